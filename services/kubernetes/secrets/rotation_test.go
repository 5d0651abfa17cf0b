package secrets

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// configured waits until all files are those of a configuration.
func (b *bench) configured(c *config.Config) map[string]StatusSpec {
	b.t.Helper()
	b.configure(c)
	all := map[string]StatusSpec{}
	for _, id := range []string{KubernetesID, EtcdID, KubeletID} {
		eventually.That(b.t, 5*time.Second, "the files of "+id, func() error {
			o, err := Statuses.Get(b.store, id)
			if all[id] = o.Spec; err == nil && !o.Spec.Current(c) {
				err = errors.New("they are of another configuration")
			}
			return err
		})
	}
	return all
}

// changed are the IDs and programs whose version differs.
func changed(a, b map[string]StatusSpec) (all []string) {
	for id, s := range a {
		for program, version := range s.Programs {
			if b[id].Programs[program] != version {
				all = append(all, program)
			}
		}
		if len(s.Programs) == 0 && b[id].Version != s.Version {
			all = append(all, id)
		}
	}
	slices.Sort(all)
	return all
}

// verified verifies the first certificate of a chain with only one authority.
func verified(t *testing.T, chain config.PEM, authority config.CertKey, name string) error {
	t.Helper()
	roots, shown := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(parse(t, authority.Crt))
	_, rest := pem.Decode(chain)
	shown.AppendCertsFromPEM(rest)
	_, err := parse(t, chain).Verify(x509.VerifyOptions{Roots: roots, Intermediates: shown, DNSName: name, CurrentTime: start})
	return err
}

// Programs restart only for files that they read at their start. Clients that know only the
// old authority accept the servers until it isn't accepted any more.
func TestRotation(t *testing.T) {
	before := controlPlane(t)
	b := newBench(t, before)
	fresh := map[string]config.CertKey{
		config.MachineAuthority: ca(t, pki.NewMachineCA), config.KubernetesAuthority: ca(t, pki.NewKubernetesCA),
		config.AggregatorAuthority: ca(t, pki.NewAggregatorCA), config.EtcdAuthority: ca(t, pki.NewEtcdCA),
	}
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	accept, issue, drop := *before, *before, *before
	for _, a := range config.Authorities {
		_, list := a.Of(&accept)
		*list = []config.CertKey{fresh[a.Name]}
		old, list := a.Of(&issue)
		*list = []config.CertKey{*old}
		*old = fresh[a.Name]
		now, _ := a.Of(&drop)
		*now = fresh[a.Name]
	}
	old := before.Cluster.ServiceAccount.Key
	accept.Cluster.ServiceAccount = config.ServiceAccount{Key: old, AcceptedKeys: []config.KeyPEM{key}}
	issue.Cluster.ServiceAccount = config.ServiceAccount{Key: key, AcceptedKeys: []config.KeyPEM{old}}
	drop.Cluster.ServiceAccount = config.ServiceAccount{Key: key}

	first := b.configured(before)
	accepting := b.configured(&accept)
	if diff := cmp.Diff([]string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"}, changed(first, accepting)); diff != "" {
		t.Errorf("accept restarts (-want +got):\n%s", diff)
	}
	issuing := b.configured(&issue)
	// The API server signs tokens with another key, and the controller manager certificates.
	if diff := cmp.Diff([]string{"kube-apiserver", "kube-controller-manager"}, changed(accepting, issuing)); diff != "" {
		t.Errorf("issue restarts (-want +got):\n%s", diff)
	}
	signing, err := os.ReadFile(filepath.Join(b.dir, "kubernetes/kube-controller-manager/ca.crt"))
	if err != nil || !bytes.Equal(signing, issue.Cluster.CA.Crt) {
		t.Errorf("the controller manager signs with another authority: %v", err)
	}
	for path, want := range map[string]int{
		"kubernetes/kube-controller-manager/root-ca.crt": 2, "kubernetes/kube-apiserver/ca.crt": 2, "kubernetes/kube-apiserver/etcd-client-ca.crt": 2,
		"kubernetes/kube-apiserver/aggregator-ca.crt": 2, "kubernetes/kube-apiserver/service-account.pub": 2, "etcd/ca.crt": 2, "kubelet/ca.crt": 2,
	} {
		text, err := os.ReadFile(filepath.Join(b.dir, path))
		if got := bytes.Count(text, []byte("-----BEGIN ")); err != nil || got != want {
			t.Errorf("%s has %d parts, %v", path, got, err)
		}
	}
	keys := b.kubernetes("the secrets", func(s KubernetesSpec) bool { return bytes.Equal(s.CA.Crt, issue.Cluster.CA.Crt) })
	api, err := API.Get(b.store, APIID)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		chain config.PEM
		a     string
	}{"kube-apiserver": {keys.APIServer.Crt, config.KubernetesAuthority}, "the machine API": {api.Spec.Serving.Crt, config.MachineAuthority}} {
		i := slices.IndexFunc(config.Authorities, func(a config.Authority) bool { return a.Name == c.a })
		former, _ := config.Authorities[i].Of(before)
		for _, authority := range []config.CertKey{*former, fresh[c.a]} {
			if err := verified(t, c.chain, authority, "n1"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	dropped := b.configured(&drop)
	if diff := cmp.Diff([]string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"}, changed(issuing, dropped)); diff != "" {
		t.Errorf("drop restarts (-want +got):\n%s", diff)
	}
	keys = b.kubernetes("the secrets", func(s KubernetesSpec) bool { return bytes.Equal(s.Trusted, drop.Cluster.CA.Crt) })
	if err := verified(t, keys.APIServer.Crt, before.Cluster.CA, "n1"); err == nil {
		t.Error("the API server still shows the old authority's signature")
	}
	if got := parse(t, keys.EtcdClient.Crt); got.CheckSignatureFrom(parse(t, fresh[config.EtcdAuthority].Crt)) != nil {
		t.Error("the API server has an old certificate for etcd")
	}
}

// A worker serves with its certificate of the old authority, and trusts both, until a control
// plane has signed the new one.
func TestWorkerServesDuringARotation(t *testing.T) {
	c := controlPlane(t)
	old, fresh := c.Machine.CA, ca(t, pki.NewMachineCA)
	c.Machine.Type = config.Worker
	c.Machine.CA, c.Machine.AcceptedCAs = config.CertKey{Crt: fresh.Crt}, []config.CertKey{{Crt: old.Crt}}
	c.Cluster.CA.Key = nil
	crt, key, err := old.CA().Issue(pki.Leaf{CN: "n1", DNS: []string{"n1"}, Server: true, Now: start})
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, c)
	b.put(os.WriteFile(filepath.Join(b.dir, "machine-api.pem"), slices.Concat(crt, key), 0o600))
	b.setTime(start.Add(time.Second)) // they look again
	eventually.That(t, 5*time.Second, "the stored certificate to be used", func() error {
		o, err := API.Get(b.store, APIID)
		if err == nil && (!bytes.Equal(o.Spec.Serving.Crt, crt) || !bytes.Equal(o.Spec.CA, c.Machine.TrustedCAs())) {
			err = errors.New("it serves with another one, or trusts others")
		}
		return err
	})
}

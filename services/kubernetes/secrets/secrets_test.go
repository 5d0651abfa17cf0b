package secrets

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// bench runs the controllers with a store and a clock of its own.
type bench struct {
	t     *testing.T
	dir   string
	store *resource.Store
	now   chan time.Time // has the current time
	log   *logLines
}

// logLines collects the log.
type logLines struct{ lines chan string }

func (s *logLines) Write(line []byte) (int, error) {
	select {
	case s.lines <- string(line):
	default: // more lines aren't needed
	}
	return len(line), nil
}

var start = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func newBench(t *testing.T, c *config.Config) *bench {
	t.Helper()
	return startBench(t, c, func(b *bench) {
		b.put(network.Hostnames.Put(b.store.As("test"), network.HostnameID, "n1"))
		b.addresses("192.0.2.10/24", "10.244.0.1/24", "fe80::1/64", "127.0.0.1/8")
	})
}

func startBench(t *testing.T, c *config.Config, network func(b *bench)) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir(), store: resource.NewStore(), now: make(chan time.Time, 1), log: &logLines{make(chan string, 1000)}}
	b.now <- start
	b.configure(c)
	network(b)
	rt, err := resource.NewRuntime(b.store, slog.New(slog.NewTextHandler(b.log, nil)), Controllers(Options{Dir: b.dir, Now: b.time, APIFile: filepath.Join(b.dir, "machine-api.pem"), Dial: noNetwork})...)
	b.put(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = rt.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return b
}

func noNetwork(context.Context, netip.Addr, string) (net.Conn, error) {
	return nil, errors.New("there is no network")
}

func (b *bench) time() time.Time {
	now := <-b.now
	b.now <- now
	return now
}

// setTime sets the clock like the time service.
func (b *bench) setTime(now time.Time) {
	<-b.now
	b.now <- now
	before, _ := clock.Statuses.Get(b.store, "node")
	b.put(clock.Statuses.Put(b.store.As("test"), "node", clock.Status{Synced: !before.Spec.Synced})) // any change
}

func (b *bench) put(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) configure(c *config.Config) {
	b.t.Helper()
	b.put(configuration.Configs.Put(b.store.As("test"), configuration.ConfigID, c))
}

func (b *bench) addresses(all ...string) {
	b.t.Helper()
	spec := network.NodeAddress{Primary: netip.MustParsePrefix(all[0]).Addr()}
	for _, p := range all {
		spec.All = append(spec.All, netip.MustParsePrefix(p))
	}
	b.put(network.Addresses.Put(b.store.As("test"), network.AddressID, spec))
}

// kubernetes waits for secrets that satisfy ok.
func (b *bench) kubernetes(name string, ok func(KubernetesSpec) bool) KubernetesSpec {
	b.t.Helper()
	var spec KubernetesSpec
	eventually.That(b.t, 5*time.Second, name, func() error {
		o, err := Kubernetes.Get(b.store, KubernetesID)
		if spec = o.Spec; err == nil && !ok(spec) {
			err = errors.New("not yet")
		}
		return err
	})
	return spec
}

func made(KubernetesSpec) bool { return true }

func controlPlane(t *testing.T) *config.Config {
	t.Helper()
	endpoint, err := config.ParseURL("https://cluster.example.org:6443")
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	c := &config.Config{}
	c.Machine.Type = config.ControlPlane
	c.Cluster.Secret = config.Secret(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32)))
	c.Cluster.ControlPlane = config.ControlPlaneSet{Endpoint: endpoint, LocalAPIServerPort: 6443}
	c.Cluster.Network = config.ClusterNetwork{
		DNSDomain:      "cluster.local",
		PodSubnets:     []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		ServiceSubnets: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10::/112")},
	}
	c.Cluster.APIServer.CertSANs = []string{"k8s.example.net", "198.51.100.7"}
	c.Machine.CA = ca(t, pki.NewMachineCA)
	c.Machine.CertSANs = []string{"api.example.net", "198.51.100.8"}
	c.Machine.Network.Interfaces = []config.Interface{{Name: "eth0", VIP: &config.VIP{IP: netip.MustParseAddr("192.0.2.99")}}}
	c.Cluster.CA = ca(t, pki.NewKubernetesCA)
	c.Cluster.AggregatorCA = ca(t, pki.NewAggregatorCA)
	c.Cluster.Etcd.CA = ca(t, pki.NewEtcdCA)
	c.Cluster.ServiceAccount.Key = key
	return c
}

func ca(t *testing.T, make func(time.Time) (pki.CA, error)) config.CertKey {
	t.Helper()
	made, err := make(start.Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return config.CertKey{Crt: made.Cert, Key: made.Key}
}

func parse(t *testing.T, text config.PEM) *x509.Certificate {
	t.Helper()
	cert, err := pki.ParseCert(text)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// S-158: every name by which the apiserver is reached.
func TestAPIServerNames(t *testing.T) {
	b := newBench(t, controlPlane(t))
	cert := parse(t, b.kubernetes("certificates", made).APIServer.Crt)
	names := slices.Sorted(slices.Values(cert.DNSNames))
	wantNames := []string{
		"cluster.example.org", "k8s.example.net", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost", "n1",
	}
	if diff := cmp.Diff(wantNames, names); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	var addrs []string
	for _, ip := range cert.IPAddresses {
		addrs = append(addrs, ip.String())
	}
	slices.Sort(addrs)
	// Neither the bridge of the pods nor the link-local address.
	if diff := cmp.Diff([]string{"10.96.0.1", "127.0.0.1", "192.0.2.10", "192.0.2.99", "198.51.100.7", "::1", "fd00:10::1"}, addrs); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

// A cluster gets another endpoint: nodes and kubeconfigs that have a former one go on. More certificates than
// needed would restart nothing, but the names must be there at once.
func TestFormerEndpointsAreNames(t *testing.T) {
	b := newBench(t, controlPlane(t))
	b.kubernetes("certificates", made)
	b.put(Issuers.Put(b.store.As("other"), IssuersID, []string{"https://cluster.example.org:6443", "https://old.example.org:6443", "https://192.0.2.44:443", "https://old.example.org"}))
	spec := b.kubernetes("names of the former endpoints", func(s KubernetesSpec) bool {
		return parse(t, s.APIServer.Crt).VerifyHostname("old.example.org") == nil
	})
	cert := parse(t, spec.APIServer.Crt)
	for _, host := range []string{"cluster.example.org", "old.example.org", "192.0.2.44"} {
		if err := cert.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if n := len(slices.Compact(slices.Sorted(slices.Values(cert.DNSNames)))); n != len(cert.DNSNames) {
		t.Errorf("a name is there twice: %q", cert.DNSNames)
	}
	eventually.That(t, 5*time.Second, "the machine API has them, too", func() error {
		api, err := API.Get(b.store, APIID)
		if err == nil {
			err = parse(t, api.Spec.Serving.Crt).VerifyHostname("192.0.2.44")
		}
		return err
	})
}

// The subject of each client certificate, and its issuer.
func TestClients(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	s := b.kubernetes("certificates", made)
	for _, tt := range []struct {
		have   config.CertKey
		ca     config.CertKey
		name   string
		groups []string
	}{
		{s.KubeletClient, c.Cluster.CA, "apiserver-kubelet-client", nil},
		{s.EtcdClient, c.Cluster.Etcd.CA, "kube-apiserver", nil},
		{s.FrontProxy, c.Cluster.AggregatorCA, "front-proxy-client", nil},
		{s.Admin, c.Cluster.CA, "admin", []string{"system:masters"}},
		{s.ControllerManager, c.Cluster.CA, "system:kube-controller-manager", nil},
		{s.Scheduler, c.Cluster.CA, "system:kube-scheduler", nil},
	} {
		cert := parse(t, tt.have.Crt)
		pool := x509.NewCertPool()
		pool.AddCert(parse(t, tt.ca.Crt))
		if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: start, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if cert.Subject.CommonName != tt.name || !slices.Equal(cert.Subject.Organization, tt.groups) {
			t.Errorf("%s is %s", tt.name, cert.Subject)
		}
	}
}

// S-340: the paths, their permissions, and that the version is a hash of their content.
func TestFiles(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	version := b.version(KubernetesID, "")
	var paths []string
	root := filepath.Join(b.dir, "kubernetes")
	b.put(filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		want := fs.FileMode(0o600)
		if d.IsDir() {
			want = 0o700
		} else {
			paths = append(paths, strings.TrimPrefix(path, root+"/"))
		}
		if err == nil && info.Mode().Perm() != want {
			t.Errorf("%s has mode %s, want %s", path, info.Mode(), want)
		}
		return err
	}))
	for _, path := range []string{
		"kube-controller-manager/ca.crt", "kube-controller-manager/ca.key", "kube-controller-manager/kubeconfig", "kube-controller-manager/service-account.key",
		"kube-scheduler/kubeconfig", "kube-apiserver/apiserver.crt", "kube-apiserver/encryption.yaml",
	} {
		if !slices.Contains(paths, path) {
			t.Errorf("%s is missing among %v", path, paths)
		}
	}
	var kubeconfig struct {
		Clusters []struct{ Cluster struct{ Server string } }
		Users    []struct{ User map[string]string }
	}
	text, err := os.ReadFile(filepath.Join(root, "kube-scheduler/kubeconfig"))
	b.put(err)
	b.put(yaml.Unmarshal(text, &kubeconfig))
	if got := kubeconfig.Clusters[0].Cluster.Server; got != balancer.URL {
		t.Errorf("the scheduler talks to %s", got)
	}
	for _, field := range []string{"client-certificate", "client-key"} {
		if _, err := os.Stat(filepath.Join(root, "kube-scheduler", kubeconfig.Users[0].User[field])); err != nil {
			t.Errorf("%s: %v", field, err)
		}
	}
	other := *c
	other.Cluster.CA = ca(t, pki.NewKubernetesCA)
	b.configure(&other)
	b.version(KubernetesID, version)
}

// version waits for a new version.
func (b *bench) version(id, before string) string {
	b.t.Helper()
	var version string
	eventually.That(b.t, 5*time.Second, "secret files of "+id+" to change", func() error {
		o, err := Statuses.Get(b.store, id)
		if version = o.Spec.Version; err == nil && version == before {
			err = errors.New("still version " + before)
		}
		return err
	})
	return version
}

// Valid certificates are kept: a change of something else restarts nothing.
func TestKeepsAndRenews(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	first := b.kubernetes("certificates", made)

	b.addresses("192.0.2.10/24") // fewer addresses
	other := *c
	other.Cluster.APIServer.Image = "changed"
	b.configure(&other)
	b.setTime(start.Add(pki.LeafValidity - pki.RenewBefore - time.Hour))
	other2 := other
	other2.Cluster.APIServer.CertSANs = append([]string{"new.example.org"}, c.Cluster.APIServer.CertSANs...)
	b.configure(&other2)
	second := b.kubernetes("the new name", func(s KubernetesSpec) bool {
		return slices.Contains(parse(t, s.APIServer.Crt).DNSNames, "new.example.org")
	})
	if !bytes.Equal(first.Admin.Crt, second.Admin.Crt) || !bytes.Equal(first.FrontProxy.Crt, second.FrontProxy.Crt) {
		t.Error("certificates that had nothing to do with the change were replaced")
	}

	b.setTime(start.Add(pki.LeafValidity - pki.RenewBefore + time.Hour))
	third := b.kubernetes("renewal", func(s KubernetesSpec) bool { return !bytes.Equal(s.Admin.Crt, first.Admin.Crt) })
	if !bytes.Equal(third.APIServer.Crt, second.APIServer.Crt) {
		t.Error("the certificate of the new name was renewed before its time")
	}

	next := other2
	next.Cluster.CA = ca(t, pki.NewKubernetesCA)
	b.configure(&next)
	fourth := b.kubernetes("the new authority", func(s KubernetesSpec) bool { return bytes.Equal(s.CA.Crt, next.Cluster.CA.Crt) })
	if err := parse(t, fourth.Admin.Crt).CheckSignatureFrom(parse(t, next.Cluster.CA.Crt)); err != nil {
		t.Errorf("the admin's certificate isn't of the new authority: %v", err)
	}
}

// A clock that was wrong at first: certificates of that time have expired.
func TestClockJumps(t *testing.T) {
	b := newBench(t, controlPlane(t))
	first := b.kubernetes("certificates", made)
	b.setTime(start.Add(3 * 365 * 24 * time.Hour))
	second := b.kubernetes("new certificates", func(s KubernetesSpec) bool { return !bytes.Equal(s.Admin.Crt, first.Admin.Crt) })
	if cert := parse(t, second.APIServer.Crt); b.time().After(cert.NotAfter) || b.time().Before(cert.NotBefore) {
		t.Errorf("valid from %s to %s at %s", cert.NotBefore, cert.NotAfter, b.time())
	}
}

// S-197, S-282
func TestSelfHostedWithoutSecrets(t *testing.T) {
	c := controlPlane(t)
	c.Cluster.AggregatorCA, c.Cluster.ServiceAccount = config.CertKey{}, config.ServiceAccount{}
	b := newBench(t, c)
	eventually.That(t, 5*time.Second, "the kubelet has its certificates all the same", func() error {
		_, err := Kubelet.Get(b.store, KubeletID)
		return err
	})
	want := "secrets.KubernetesController: controller failed: missing cluster.aggregatorCA secret"
	deadline := time.After(eventually.Scale(5 * time.Second))
	for {
		select {
		case line := <-b.log.lines:
			if strings.Contains(line, want) {
				return
			}
		case <-deadline:
			t.Fatalf("never said %q", want)
		}
	}
}

// A worker has the authority that its kubelet trusts, and no keys.
func TestWorker(t *testing.T) {
	c := controlPlane(t)
	c.Machine.Type = config.Worker
	c.Cluster.CA.Key = nil
	b := newBench(t, c)
	eventually.That(t, 5*time.Second, "kubelet's CA", func() error {
		o, err := Kubelet.Get(b.store, KubeletID)
		if err == nil && (!bytes.Equal(o.Spec.CA, c.Cluster.CA.Crt) || len(o.Spec.Serving.Key) > 0 || len(o.Spec.Client.Key) > 0) {
			err = fmt.Errorf("got %+v", o.Spec)
		}
		return err
	})
	if _, err := Kubernetes.Get(b.store, KubernetesID); !errors.Is(err, resource.ErrNotFound) {
		t.Errorf("control plane secrets on a worker: %v", err)
	}
}

func TestEtcd(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	var spec EtcdSpec
	eventually.That(t, 5*time.Second, "etcd's certificates", func() error {
		o, err := Etcd.Get(b.store, EtcdID)
		spec = o.Spec
		return err
	})
	pool := x509.NewCertPool()
	pool.AddCert(parse(t, c.Cluster.Etcd.CA.Crt))
	for _, name := range []string{"n1", "localhost", "127.0.0.1", "192.0.2.10"} {
		for _, cert := range []config.PEM{spec.Server.Crt, spec.Peer.Crt} {
			if _, err := parse(t, cert).Verify(x509.VerifyOptions{Roots: pool, CurrentTime: start, DNSName: name}); err != nil {
				t.Errorf("as %s: %v", name, err)
			}
		}
	}
}

// S-340 is for programs; users see at most fingerprints.
func TestKeysDontShow(t *testing.T) {
	b := newBench(t, controlPlane(t))
	text, err := yaml.Marshal(b.kubernetes("certificates", made))
	if err != nil || strings.Contains(string(text), "PRIVATE KEY") || strings.Count(string(text), "(secret)") < 8 {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestEncryptionConfig(t *testing.T) {
	with, err := encryptionConfig([]config.KeyPEM{bytes.Repeat([]byte{1}, 32)})
	if err != nil || strings.Index(string(with), "secretbox") > strings.Index(string(with), "identity") {
		t.Errorf("the first provider writes: %s %v", with, err)
	}
	without, err := encryptionConfig(nil)
	if err != nil || strings.Contains(string(without), "secretbox") {
		t.Errorf("%s %v", without, err)
	}
	one, two := config.Secret(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32))), config.NewKey32()
	keys, err := encryptionKeys(&config.Cluster{Secret: one, AcceptedSecrets: []config.Secret{two}})
	again, _ := encryptionKeys(&config.Cluster{Secret: two, AcceptedSecrets: []config.Secret{one}})
	if err != nil || len(keys) != 2 || len(again) != 2 || len(keys[0]) != 32 || !bytes.Equal(keys[0], again[1]) || !bytes.Equal(keys[1], again[0]) || bytes.Equal(keys[0], keys[1]) {
		t.Errorf("%d and %d keys, %v", len(keys), len(again), err)
	}
	if none, err := encryptionKeys(&config.Cluster{}); len(none) > 0 || err != nil {
		t.Errorf("without a secret: %d, %v", len(none), err)
	}
	both, err := encryptionConfig(keys)
	first, second := strings.Index(string(both), base64.StdEncoding.EncodeToString(keys[0])), strings.Index(string(both), base64.StdEncoding.EncodeToString(keys[1]))
	if err != nil || first < 0 || first > second || second > strings.Index(string(both), "identity") {
		t.Errorf("the first key writes, and the other one reads: %s %v", both, err)
	}
}

package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// credentials are for a kubelet of this name.
func credentials(t *testing.T, hostname string) config.CertKey {
	t.Helper()
	now := time.Now()
	ca, err := pki.NewKubernetesCA(now)
	must(t, err)
	crt, key, err := ca.Issue(pki.Leaf{CN: user(hostname), Orgs: []string{"system:nodes"}, Client: true, Now: now})
	must(t, err)
	return config.CertKey{Crt: crt, Key: key}
}

// A kubelet that is started because the node was renamed waits for the name, and
// for credentials under it.
func TestNewNameIsWaitedFor(t *testing.T) {
	old, fresh := credentials(t, "old"), credentials(t, "new")
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		w := store.As("test")
		named := func(name string) *config.Config {
			return &config.Config{Machine: config.Machine{Network: config.Network{Hostname: name}}}
		}
		must(t, configuration.Configs.Put(w, configuration.ConfigID, named("old")))
		must(t, network.Hostnames.Put(w, network.HostnameID, "old"))
		must(t, network.Statuses.Put(w, network.ID, network.Status{Config: 1}))
		must(t, secrets.Kubelet.Put(w, secrets.KubeletID, secrets.KubeletSpec{Client: old}))
		must(t, secrets.Statuses.Put(w, secrets.KubeletID, secrets.StatusSpec{}))
		o := Options{Store: store}
		must(t, o.awaitIdentity(t.Context()))

		must(t, configuration.Configs.Put(w, configuration.ConfigID, named("new")))
		done := make(chan error, 1)
		go func() { done <- o.awaitIdentity(t.Context()) }()
		for _, step := range []func() error{
			func() error { return nil },
			func() error { return network.Hostnames.Put(w, network.HostnameID, "new") },
			func() error { return network.Statuses.Put(w, network.ID, network.Status{Config: 2}) },
		} {
			must(t, step())
			synctest.Wait()
			select {
			case err := <-done:
				t.Fatalf("it didn't wait: %v", err)
			default:
			}
		}
		must(t, secrets.Kubelet.Put(w, secrets.KubeletID, secrets.KubeletSpec{Client: fresh}))
		must(t, <-done)
	})
}

// Credentials of another name, which the API server wouldn't let register this
// one, are removed; the node's own stay.
func TestCredentialsOfAnotherNameAreForgotten(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	client, kubeconfig := filepath.Join(dir, "current.pem"), filepath.Join(dir, "kubeconfig")
	must(t, forgetOther("node-1", secrets.KubeletSpec{}, client, kubeconfig))
	pair := credentials(t, "node-1")
	must(t, os.WriteFile(filepath.Join(dir, "1.pem"), slices.Concat([]byte(pair.Key), pair.Crt), 0o600))
	must(t, os.Symlink("1.pem", client)) // as the kubelet keeps it
	must(t, os.WriteFile(kubeconfig, nil, 0o600))
	must(t, forgetOther("node-1", secrets.KubeletSpec{}, client, kubeconfig))
	if _, err := os.Stat(client); err != nil {
		t.Error(err)
	}
	must(t, forgetOther("node-2", secrets.KubeletSpec{}, client, kubeconfig))
	for _, file := range []string{client, kubeconfig} {
		if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there (%v)", file, err)
		}
	}
}

// Certificates of an authority that is accepted, and doesn't issue any more, are replaced:
// those of any other authority stay, as the kubelet may have no valid token.
func TestCertificatesOfAFormerAuthorityAreForgotten(t *testing.T) {
	t.Parallel()
	now := time.Now()
	made := func() config.CertKey {
		ca, err := pki.NewKubernetesCA(now)
		must(t, err)
		return config.CertKey{Crt: ca.Cert, Key: ca.Key}
	}
	old, fresh := made(), made()
	for name, c := range map[string]struct {
		by   config.CertKey
		stay bool
	}{"issuing": {fresh, true}, "former": {old, false}, "unknown": {made(), true}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			client, serving, kubeconfig := filepath.Join(dir, "client.pem"), filepath.Join(dir, "server.pem"), filepath.Join(dir, "kubeconfig")
			crt, key, err := c.by.CA().Issue(pki.Leaf{CN: user("node-1"), DNS: []string{"node-1"}, Client: true, Server: true, Now: now})
			must(t, err)
			for _, file := range []string{client, serving, kubeconfig} {
				must(t, os.WriteFile(file, slices.Concat(crt, key), 0o600))
			}
			s := secrets.KubeletSpec{CA: config.Trusted(fresh, []config.CertKey{old}), Issuing: fresh.Crt}
			must(t, forgetOther("node-1", s, client, kubeconfig))
			must(t, forgetFormer(s, serving))
			must(t, forgetFormer(s, serving)) // it is gone
			for _, file := range []string{client, serving, kubeconfig} {
				if _, err := os.Stat(file); (err == nil) != c.stay {
					t.Errorf("%s: %v", file, err)
				}
			}
		})
	}
}

// A certificate is renewed before the kubelet would ask by itself, without a proof: that is at 70 % of its validity at
// the earliest (client-go's certificate manager).
func TestCertificateIsDueBeforeTheKubeletAsks(t *testing.T) {
	t.Parallel()
	ca, err := pki.NewKubernetesCA(time.Now())
	must(t, err)
	for _, life := range []time.Duration{time.Hour, 24 * time.Hour, 90 * 24 * time.Hour, pki.LeafValidity} {
		crt, _, err := ca.Issue(pki.Leaf{CN: user("node-1"), Client: true, Now: time.Now(), Validity: life})
		must(t, err)
		cert, err := pki.ParseCert(crt)
		must(t, err)
		at := func(part float64) time.Time {
			whole := cert.NotAfter.Sub(cert.NotBefore)
			return cert.NotBefore.Add(time.Duration(part * float64(whole)))
		}
		for _, tc := range []struct {
			part   float64
			within time.Duration
			due    bool
			what   string
		}{
			{0.66, pki.RenewBefore, false, "early"}, {0.69, pki.RenewBefore, true, "before 70 %"}, {1.01, pki.RenewBefore, true, "after its end"},
			{0.99, 0, false, "before its end"}, {1.01, 0, true, "expired"},
		} {
			if got := due(crt, at(tc.part), tc.within); got != tc.due {
				t.Errorf("%s of %s: %t", tc.what, life, got)
			}
		}
	}
	if due([]byte("nothing"), time.Now(), pki.RenewBefore) {
		t.Error("nothing is due")
	}
}

// What a pod has left in the place of a certificate keeps no node from getting one. A certificate of an authority that
// isn't known is left if Kubernetes takes it, removed if Kubernetes refuses it, and tried again if nothing answers.
func TestCertificatesOfPodsAreForgotten(t *testing.T) {
	t.Parallel()
	ca, err := pki.NewKubernetesCA(time.Now())
	must(t, err)
	ours, _, err := ca.Issue(pki.Leaf{CN: user("node-1"), Client: true, Now: time.Now()})
	must(t, err)
	theirs := credentials(t, "node-1").Crt
	dir := t.TempDir()
	client, kubeconfig := filepath.Join(dir, "client.pem"), filepath.Join(dir, "kubeconfig")
	for what, make := range map[string]func(string) error{
		"a directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "deep"), 0o755) },
		"a pipe":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a link":      func(path string) error { return os.Symlink("/dev/zero", path) },
		"text":        func(path string) error { return os.WriteFile(path, []byte("none"), 0o600) },
	} {
		must(t, make(client))
		must(t, errors.Join(forgetOther("node-1", secrets.KubeletSpec{}, client, kubeconfig), make(client)))
		if must(t, forgetFormer(secrets.KubeletSpec{}, client)); what != "text" {
			if _, err := os.Lstat(client); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s stays: %v", what, err)
			}
		}
		must(t, os.RemoveAll(client))
	}
	s := secrets.KubeletSpec{CA: ca.Cert, Issuing: ca.Cert}
	refused := &kubeclient.StatusError{Code: http.StatusUnauthorized}
	for _, tt := range []struct {
		crt          []byte
		answer       error
		waits, stays bool
	}{
		{theirs, nil, false, true},
		{theirs, errors.New("connection refused"), true, true},
		{theirs, &kubeclient.StatusError{Code: http.StatusForbidden}, true, false},
		{theirs, refused, true, false},
		{ours, refused, false, true},
	} {
		must(t, os.WriteFile(client, tt.crt, 0o600))
		err := forgetForeign(client, s, func() error { return tt.answer })
		if _, gone := os.Stat(client); (err != nil) != tt.waits || (gone == nil) != tt.stays {
			t.Errorf("after %v: %v, %v", tt.answer, err, gone)
		}
	}
}

// The kubelet is told its address at its start, so it starts anew with another
// one; not when the node merely has none for a while.
func TestNewAddressEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		w := store.As("test")
		at := func(addr string) {
			must(t, network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr(addr)}))
		}
		at("10.5.0.2")
		done := make(chan error, 1)
		go func() {
			done <- whileAddressed(t.Context(), store, func(ctx context.Context) error {
				<-ctx.Done()
				return nil
			})
		}()
		synctest.Wait()
		must(t, network.Addresses.Delete(w, network.AddressID))
		synctest.Wait()
		at("10.5.0.2")
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("it ended: %v", err)
		default:
		}
		at("10.5.0.3")
		if err := <-done; err == nil || err.Error() != "the node's addresses changed from 10.5.0.2 to 10.5.0.3" {
			t.Error(err)
		}
		if err := whileAddressed(t.Context(), store, func(context.Context) error { return errors.New("its own end") }); err == nil || err.Error() != "its own end" {
			t.Error(err)
		}
	})
}

// With pods of both families, an address of the second one counts, too: the kubelet starts anew when one comes, or
// another one takes its place, but not for one that is gone, or beside it.
func TestAddressOfTheSecondFamilyEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		w := store.As("test")
		c := cluster(t, func(c *config.Config) {
			c.Cluster.Network.PodSubnets = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
		})
		must(t, configuration.Configs.Put(w, configuration.ConfigID, c))
		at := func(more ...string) {
			a := network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2"), All: []netip.Prefix{netip.MustParsePrefix("10.5.0.2/24")}}
			for _, text := range more {
				a.All = append(a.All, netip.MustParsePrefix(text))
			}
			must(t, network.Addresses.Put(w, network.AddressID, a))
			synctest.Wait()
		}
		at()
		for _, run := range []struct {
			stays, ends []string
			want        string
		}{
			{nil, []string{"fd00:5::2/64"}, "the node's addresses changed from 10.5.0.2 to 10.5.0.2 fd00:5::2"},
			{[]string{"fd00:6::2/64", "fd00:5::2/64"}, []string{"fd00:6::2/64"}, "the node's addresses changed from 10.5.0.2 fd00:5::2 to 10.5.0.2 fd00:6::2"},
		} {
			done := make(chan error, 1)
			go func() {
				done <- whileAddressed(t.Context(), store, func(ctx context.Context) error {
					<-ctx.Done()
					return nil
				})
			}()
			synctest.Wait()
			at(run.stays...)
			at()
			at(run.stays...)
			select {
			case err := <-done:
				t.Fatalf("it ended: %v", err)
			default:
			}
			at(run.ends...)
			if err := <-done; err == nil || err.Error() != run.want {
				t.Error(err)
			}
		}
	})
}

//go:build story

package vip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/controlplane"
	"github.com/garboard-os/garboard/services/resource"
	"github.com/garboard-os/garboard/services/secrets"
	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// componentsVar is a list like PATH of the folders with etcd. `make stories` sets
// it once it is built.
const componentsVar = "GARBOARD_COMPONENTS"

// realEtcd is one member, alone in the test's network namespace, and what a node's
// store says of it.
func realEtcd(t *testing.T) (*resource.Store, *exec.Cmd) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	must(err)
	must(netlink.LinkSetUp(lo))
	ca, err := pki.NewEtcdCA(time.Now())
	must(err)
	keys := secrets.EtcdSpec{CA: ca.Cert}
	keys.ClientCert, keys.ClientKey, err = ca.Issue(pki.Leaf{CN: "garboard", Client: true, Now: time.Now()})
	must(err)
	keys.ServerCert, keys.ServerKey, err = ca.Issue(pki.Leaf{CN: "etcd", Client: true, Server: true, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Now: time.Now()})
	must(err)
	dir := t.TempDir()
	for name, data := range map[string][]byte{"ca.crt": keys.CA, "tls.crt": keys.ServerCert, "tls.key": keys.ServerKey} {
		must(os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	program := "etcd"
	for _, folder := range filepath.SplitList(os.Getenv(componentsVar)) {
		if path := filepath.Join(folder, "etcd"); exec.Command(path, "--version").Run() == nil {
			program = path
		}
	}
	cmd := exec.Command(program, "--data-dir="+filepath.Join(dir, "data"), "--listen-client-urls=https://127.0.0.1:2379", "--advertise-client-urls=https://127.0.0.1:2379",
		"--client-cert-auth", "--trusted-ca-file="+filepath.Join(dir, "ca.crt"), "--cert-file="+filepath.Join(dir, "tls.crt"), "--key-file="+filepath.Join(dir, "tls.key"),
		"--unsafe-no-fsync")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatalf("no etcd in %s=%q (`make stories` builds and sets it): %v", componentsVar, os.Getenv(componentsVar), err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	store := resource.NewStore()
	must(secrets.Etcd.Put(store.As("test"), secrets.EtcdID, keys))
	must(controlplane.EtcdStatuses.Put(store.As("test"), controlplane.EtcdID, controlplane.EtcdStatus{Ready: true, Endpoint: "https://127.0.0.1:2379"}))
	return store, cmd
}

// candidate is a claim, and the last that it was told.
type candidate struct {
	*claim
	t    *testing.T
	self node
	stop func()

	mu      sync.Mutex // guards all below
	last    word
	holders map[string]bool // that it has ever heard of
	err     error
}

func newCandidate(t *testing.T, store *resource.Store, self node) *candidate {
	c := &candidate{t: t, self: self, holders: map[string]bool{}}
	c.claim = newClaim(store, shared4,
		func(w word) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.last = w; w.held {
				c.holders[w.holder.Name] = true
			}
		},
		func(err error) { c.mu.Lock(); defer c.mu.Unlock(); c.err = err })
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { c.run(ctx) })
	c.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(c.stop)
	return c
}

func (c *candidate) hears(what string, check func(word) bool) word {
	c.t.Helper()
	var w word
	eventually.That(c.t, 20*time.Second, c.self.Name+" hears that "+what, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if w = c.last; !check(w) || time.Since(w.asked) > 2*askEvery {
			return fmt.Errorf("it was told %+v (%v)", w, c.err)
		}
		return nil
	})
	return w
}

// S-116: etcd's queue. One is the holder, in the order of coming; one that is put out
// or goes makes room; and without etcd nobody is told anything.
func TestTheQueueInEtcd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, etcd := realEtcd(t)
	a := newCandidate(t, store, node{Name: "a", Address: netip.MustParseAddr("10.5.0.2"), MAC: ownMAC.String()})
	a.hears("nobody holds it", func(w word) bool { return !w.held && !w.mine && w.others == 0 })
	a.want(&a.self)
	a.hears("it is the holder", func(w word) bool { return w.mine && w.holder == a.self && w.others == 0 })
	b := newCandidate(t, store, node{Name: "b", Address: netip.MustParseAddr("10.5.0.3"), MAC: peerMAC.String()})
	b.want(&b.self)
	w := b.hears("it is next", func(w word) bool { return w.held && !w.mine && w.holder == a.self && w.next && w.others == 1 })
	if name, ok := w.knows(ownMAC); !ok || name != "a" {
		t.Errorf("whose MAC address is %s? %q", ownMAC, name)
	}
	a.hears("another one is there", func(w word) bool { return w.mine && w.others == 1 })

	offer(b.out, w.lease)
	b.hears("it is the holder", func(w word) bool { return w.mine })
	a.hears("it is next, as it came back", func(w word) bool { return !w.mine && w.holder == b.self && w.next })

	b.want(nil)
	a.hears("it is the holder", func(w word) bool { return w.mine && w.others == 0 })
	b.hears("it is none of the candidates", func(w word) bool { return w.held && !w.mine && !w.next && w.others == 1 })
	a.stop()
	b.hears("nobody holds it, and both are remembered", func(w word) bool { return !w.held && len(w.nodes) == 2 })

	if err := etcd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 20*time.Second, "b is told nothing more", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.err == nil || time.Since(b.last.asked) < 2*askEvery {
			return errors.New("it is")
		}
		return nil
	})
}

// S-116: a leader of etcd that was frozen ends the leases of all when it is back. All come
// back at once, in any order, and the holder stays; another one follows only where the
// holder doesn't come back.
func TestTheHolderStaysWhenAllLeasesEnd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, _ := realEtcd(t)
	a := newCandidate(t, store, node{Name: "a", Address: netip.MustParseAddr("10.5.0.2"), MAC: ownMAC.String()})
	a.want(&a.self)
	a.hears("it is the holder", func(w word) bool { return w.mine })
	b := newCandidate(t, store, node{Name: "b", Address: netip.MustParseAddr("10.5.0.3"), MAC: peerMAC.String()})
	b.want(&b.self)
	b.hears("it is next", func(w word) bool { return w.next && w.holder == a.self })

	client, err := a.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for range 10 {
		all, err := client.Leases(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ended := map[clientv3.LeaseID]bool{}
		for _, l := range slices.Backward(all.Leases) {
			if _, err := client.Revoke(t.Context(), l.ID); err != nil {
				t.Fatal(err)
			}
			ended[l.ID] = true
		}
		back := func(w word) bool { return w.own && w.others == 1 && w.held && !ended[w.lease] }
		a.hears("it is the holder again", func(w word) bool { return back(w) && w.mine })
		b.hears("it is next again", func(w word) bool { return back(w) && w.next })
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.holders["b"] {
		t.Error("the address went to b for nothing")
	}
}

// A holder that is named, and never comes back, keeps nobody from the address.
func TestAHolderThatDoesNotComeBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, _ := realEtcd(t)
	b := newCandidate(t, store, node{Name: "b", Address: netip.MustParseAddr("10.5.0.3"), MAC: peerMAC.String()})
	client, err := b.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Put(t.Context(), b.key+holders, `{"name":"ghost"}`); err != nil {
		t.Fatal(err)
	}
	b.want(&b.self)
	b.hears("it is the holder", func(w word) bool { return w.mine })
	got, err := client.Get(t.Context(), b.key+holders)
	if err != nil || len(got.Kvs) != 1 || !strings.Contains(string(got.Kvs[0].Value), `"b"`) {
		t.Errorf("etcd names %v, %v", got, err)
	}
}

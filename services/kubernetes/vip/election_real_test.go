//go:build e2e

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

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// componentsVar is a list like PATH of the folders with etcd. `make e2e` sets
// it once it is built.
const componentsVar = "GARBOARD_COMPONENTS"

// member is a process of etcd.
type member struct {
	t              *testing.T
	data, endpoint string
	args           []string
	cmd            *exec.Cmd
}

func (m *member) start() {
	m.t.Helper()
	m.cmd = exec.Command(m.args[0], m.args[1:]...)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.cmd.Start(); err != nil {
		m.t.Fatalf("no etcd in %s=%q (`make e2e` builds and sets it): %v", componentsVar, os.Getenv(componentsVar), err)
	}
}

func (m *member) kill() {
	_ = m.cmd.Process.Kill()
	_ = m.cmd.Wait()
}

// realEtcd is one member, alone in the test's network namespace, and the store
// of its node.
func realEtcd(t *testing.T) (*resource.Store, *member) {
	t.Helper()
	stores, members := realEtcds(t, 1)
	return stores[0], members[0]
}

// realEtcds are members of one cluster, each with the store of its node.
func realEtcds(t *testing.T, count int) (stores []*resource.Store, members []*member) {
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
	keys.Client.Crt, keys.Client.Key, err = ca.Issue(pki.Leaf{CN: "garboard", Client: true, Now: time.Now()})
	must(err)
	keys.Server.Crt, keys.Server.Key, err = ca.Issue(pki.Leaf{CN: "etcd", Client: true, Server: true, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Now: time.Now()})
	must(err)
	dir := t.TempDir()
	for name, data := range map[string][]byte{"ca.crt": keys.CA, "tls.crt": keys.Server.Crt, "tls.key": keys.Server.Key} {
		must(os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	program := "etcd"
	for _, folder := range filepath.SplitList(os.Getenv(componentsVar)) {
		if path := filepath.Join(folder, "etcd"); exec.Command(path, "--version").Run() == nil {
			program = path
		}
	}
	var all []string
	for i := range count {
		all = append(all, fmt.Sprintf("m%d=http://127.0.0.1:%d", i, 2380+10*i))
	}
	for i := range count {
		m := &member{t: t, data: filepath.Join(dir, fmt.Sprintf("data%d", i)), endpoint: fmt.Sprintf("https://127.0.0.1:%d", 2379+10*i)}
		name, peer, _ := strings.Cut(all[i], "=")
		m.args = []string{program, "--name=" + name, "--data-dir=" + m.data, "--listen-client-urls=" + m.endpoint, "--advertise-client-urls=" + m.endpoint,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=" + strings.Join(all, ","),
			"--client-cert-auth", "--trusted-ca-file=" + filepath.Join(dir, "ca.crt"), "--cert-file=" + filepath.Join(dir, "tls.crt"), "--key-file=" + filepath.Join(dir, "tls.key"),
			"--unsafe-no-fsync"}
		m.start()
		t.Cleanup(func() { m.kill() })
		store := resource.NewStore()
		must(secrets.Etcd.Put(store.As("test"), secrets.EtcdID, keys))
		must(etcd.Statuses.Put(store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: m.endpoint}))
		stores, members = append(stores, store), append(members, m)
	}
	return stores, members
}

// candidate is an election, and its last view.
type candidate struct {
	*election
	t    *testing.T
	self node
	stop func()

	mu      sync.Mutex // guards all below
	last    view
	holders []string // of the views, in order
	err     error
}

func newCandidate(t *testing.T, store *resource.Store, self node) *candidate {
	c := &candidate{t: t, self: self}
	c.election = newElection(store, shared4,
		func(w view) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.last = w; w.held && (len(c.holders) == 0 || c.holders[len(c.holders)-1] != w.holder.Name) {
				c.holders = append(c.holders, w.holder.Name)
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

func (c *candidate) waitFor(what string, check func(view) bool) view {
	c.t.Helper()
	var w view
	eventually.That(c.t, 20*time.Second, c.self.Name+" hears that "+what, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if w = c.last; !check(w) || time.Since(w.askedAt) > 2*askEvery {
			return fmt.Errorf("its view is %+v (%v)", w, c.err)
		}
		return nil
	})
	return w
}

// S-116: etcd's queue. The first is the holder; after a holder is evicted or
// leaves, the next one follows; and without etcd there are no views.
func TestTheQueueInEtcd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, etcd := realEtcd(t)
	a := newCandidate(t, store, nodeA)
	a.waitFor("nobody holds it", func(w view) bool { return !w.held && !w.mine && w.others == 0 })
	a.setCandidate(&a.self)
	a.waitFor("it is the holder", func(w view) bool { return w.mine && w.holder == a.self && w.others == 0 })
	b := newCandidate(t, store, nodeB)
	b.setCandidate(&b.self)
	w := b.waitFor("it is next", func(w view) bool { return w.held && !w.mine && w.holder == a.self && w.next && w.others == 1 })
	if name, ok := w.nodeByMAC(ownMAC); !ok || name != "a" {
		t.Errorf("whose MAC address is %s? %q", ownMAC, name)
	}
	a.waitFor("another one is there", func(w view) bool { return w.mine && w.others == 1 })

	offer(b.evictions, w)
	b.waitFor("it is the holder", func(w view) bool { return w.mine })
	a.waitFor("it is next, as it came back", func(w view) bool { return !w.mine && w.holder == b.self && w.next })

	b.setCandidate(nil)
	a.waitFor("it is the holder", func(w view) bool { return w.mine && w.others == 0 })
	b.waitFor("it is none of the candidates", func(w view) bool { return w.held && !w.mine && !w.next && w.others == 1 })
	a.stop()
	b.waitFor("nobody holds it, and both are remembered", func(w view) bool { return !w.held && len(w.nodes) == 2 })

	etcd.kill()
	eventually.That(t, 20*time.Second, "b is told nothing more", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.err == nil || time.Since(b.last.askedAt) < 2*askEvery {
			return errors.New("it is")
		}
		return nil
	})
}

// S-116: a leader of etcd that was frozen ends the leases of all when it is
// back. All enter again at once, in any order, and the holder stays; another
// one follows only if the holder doesn't come back.
func TestTheHolderStaysWhenAllLeasesEnd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, _ := realEtcd(t)
	a := newCandidate(t, store, nodeA)
	a.setCandidate(&a.self)
	a.waitFor("it is the holder", func(w view) bool { return w.mine })
	b := newCandidate(t, store, nodeB)
	b.setCandidate(&b.self)
	b.waitFor("it is next", func(w view) bool { return w.next && w.holder == a.self })

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
		back := func(w view) bool { return w.own && w.others == 1 && w.held && !ended[w.lease] }
		a.waitFor("it is the holder again", func(w view) bool { return back(w) && w.mine })
		b.waitFor("it is next again", func(w view) bool { return back(w) && w.next })
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if slices.Contains(b.holders, "b") {
		t.Error("the address went to b for nothing")
	}
}

// A holder that never comes back doesn't block the address.
func TestAHolderThatDoesNotComeBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, _ := realEtcd(t)
	b := newCandidate(t, store, nodeB)
	client, err := b.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Put(t.Context(), b.key+holders, `{"name":"ghost"}`); err != nil {
		t.Fatal(err)
	}
	b.setCandidate(&b.self)
	b.waitFor("it is the holder", func(w view) bool { return w.mine })
	got, err := client.Get(t.Context(), b.key+holders)
	if err != nil || len(got.Kvs) != 1 || !strings.Contains(string(got.Kvs[0].Value), `"b"`) {
		t.Errorf("etcd names %v, %v", got, err)
	}
}

// S-116: a snapshot of etcd has the holder and the queue from the time when it was
// made. All nodes soon agree on one holder, and receive changes at once, as before.
func TestEtcdIsRestored(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, etcd := realEtcd(t)
	a, b := newCandidate(t, store, nodeA), newCandidate(t, store, nodeB)
	a.setCandidate(&a.self)
	a.waitFor("it is the holder", func(w view) bool { return w.mine })
	b.setCandidate(&b.self)
	b.waitFor("it is next", func(w view) bool { return w.next })
	etcd.kill()
	old := filepath.Join(t.TempDir(), "snapshot")
	if err := os.CopyFS(old, os.DirFS(etcd.data)); err != nil {
		t.Fatal(err)
	}
	etcd.start()
	a.waitFor("it still is", func(w view) bool { return w.mine && w.others == 1 })
	a.setCandidate(nil)
	w := b.waitFor("it is the holder", func(w view) bool { return w.mine && w.others == 0 })
	delayOf := func(round int) time.Duration {
		t.Helper()
		client, err := b.dial()
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		c := node{Name: fmt.Sprintf("c%d", round), MAC: fmt.Sprintf("02:00:00:00:00:%02x", round)}
		began := time.Now()
		eventually.That(t, 20*time.Second, "etcd takes a node", func() error {
			_, err := client.Put(t.Context(), b.key+nodes+c.Name, fmt.Sprintf(`{"name":%q,"mac":%q}`, c.Name, c.MAC))
			return err
		})
		b.waitFor("there is one more", func(w view) bool { return slices.Contains(w.nodes, c) })
		return time.Since(began)
	}
	for round := range 20 { // until the revision is above that just after the restore
		delayOf(round)
	}

	etcd.kill()
	if err := errors.Join(os.RemoveAll(etcd.data), os.CopyFS(etcd.data, os.DirFS(old))); err != nil {
		t.Fatal(err)
	}
	etcd.start()
	b.waitFor("it is the holder, as a doesn't come back", func(now view) bool { return now.mine && now.others == 0 && now.revision < w.revision+20 })
	a.waitFor("b is the holder", func(w view) bool { return w.holder == b.self && !w.mine })
	least := time.Hour
	for round := range 5 {
		least = min(least, delayOf(100+round))
	}
	if least > askEvery/2 {
		t.Errorf("what changed was heard after %s at best: nobody watches", least)
	}
}

// A view may be old when a holder is evicted because of it. The eviction works only if
// nothing has changed since.
func TestOldViewsDoNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	store, _ := realEtcd(t)
	elections := map[node]*election{}
	for _, n := range []node{nodeA, nodeB} {
		elections[n] = newElection(store, shared4, nil, func(err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	a, b := elections[nodeA], elections[nodeB]
	client, err := a.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	enter := func(c *election, n node) clientv3.LeaseID {
		t.Helper()
		lease, err := c.enter(t.Context(), client, n)
		must(err)
		return lease
	}
	ask := func(c *election, lease clientv3.LeaseID) view {
		t.Helper()
		w, err := c.ask(t.Context(), client, lease)
		must(err)
		return w
	}
	eventually.That(t, 20*time.Second, "etcd serves", func() error {
		_, err := b.ask(t.Context(), client, clientv3.NoLease)
		return err
	})
	leaseA := enter(a, nodeA)
	if w := ask(a, leaseA); !w.mine {
		t.Fatalf("a heard %+v", w)
	}
	leaseB := enter(b, nodeB)
	gone := ask(b, leaseB)
	if !gone.next || gone.holder != nodeA {
		t.Fatalf("b heard %+v", gone)
	}

	// a's lease has ended, and a is back.
	a.revoke(client, leaseA)
	leaseA = enter(a, nodeA)
	must(b.evict(t.Context(), client, gone))
	if w := ask(a, leaseA); !w.mine {
		t.Errorf("a was put out by what was so before it came back: it heard %+v", w)
	}

	// a leaves, b has it, and gives it back to a: the view of a is old.
	gone = ask(b, leaseB)
	a.leave(client, leaseA, nodeA)
	if w := ask(b, leaseB); !w.mine {
		t.Fatalf("b heard %+v", w)
	}
	must(b.evict(t.Context(), client, gone))
	leaseA = enter(a, nodeA)
	if w := ask(a, leaseA); w.holder != nodeB {
		t.Errorf("b was put out by what was said of a: a heard %+v", w)
	}

	// b is missing, and comes back just before a takes its place.
	b.revoke(client, leaseB)
	got, err := client.Get(t.Context(), a.key+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	must(err)
	a.missing = time.Now().Add(-returnWithin)
	w, unnamed, err := a.read(got, leaseA, time.Now())
	if must(err); !unnamed {
		t.Fatalf("a heard %+v, and isn't to take the place of one that is missing", w)
	}
	leaseB = enter(b, nodeB)
	if must(a.take(t.Context(), client, &w)); w.mine {
		t.Error("a has taken the place of one that was back")
	}
	if w := ask(b, leaseB); !w.mine {
		t.Errorf("b heard %+v", w)
	}

	// a is the first of a new queue, and becomes the holder just when b finds it gone.
	a.leave(client, leaseA, nodeA)
	b.leave(client, leaseB, nodeB)
	leaseA, leaseB = enter(a, nodeA), enter(b, nodeB)
	if gone = ask(b, leaseB); gone.named != 0 || gone.lease != leaseA {
		t.Fatalf("b heard %+v", gone)
	}
	if w := ask(a, leaseA); !w.mine {
		t.Fatalf("a heard %+v", w)
	}
	must(b.evict(t.Context(), client, gone))
	if w := ask(a, leaseA); !w.mine {
		t.Errorf("a was put out by what was so before it was named: it heard %+v", w)
	}
}

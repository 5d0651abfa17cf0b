//go:build e2e

package etcd

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// moves gives the node another address, and certificates for it, as its controllers do.
func (n *realNode) moves(to netip.Addr) {
	t := n.rig.t
	n.kill()
	n.addr = to
	as := n.o.Store.As("test")
	keys, err := secrets.Etcd.Get(n.o.Store, secrets.EtcdID)
	must(t, err)
	keys.Spec.Server.Crt, keys.Spec.Server.Key, err = n.rig.etcd.Issue(pki.Leaf{
		CN: n.name, Client: true, Server: true, IPs: []netip.Addr{to, netip.MustParseAddr("127.0.0.1")}, Now: time.Now(),
	})
	must(t, err)
	must(t, secrets.Etcd.Put(as, secrets.EtcdID, keys.Spec))
	must(t, network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: to}))
	n.writeKeys()
	n.start()
}

// The members of a cluster get other addresses, one after another, while it serves: the list of members has the new
// address before the node has it. A single member, too, may have it in the list later.
func TestRealMove(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	all := []*realNode{a, b, c}
	a.start()
	a.serves()
	was := a.identityOf(t)
	elsewhere := func(n *realNode) netip.Addr { to := n.addr.As4(); to[3] += 100; return netip.AddrFrom4(to) }

	// Alone: its address changes first, as with DHCP, and nobody else than Move changes the list.
	first := a.addr
	a.moves(elsewhere(a))
	a.serves()
	if got := a.peerURLs(); !slices.Contains(got, self{addr: first}.peerURL()) {
		t.Errorf("the list has changed by itself: %q", got)
	}
	must(t, a.move(a.addr))
	must(t, a.move(a.addr))
	if got, want := a.peerURLs(), []string{self{addr: a.addr}.peerURL()}; !slices.Equal(got, want) {
		t.Errorf("the list has %q, want %q", got, want)
	}
	r.knows(0, a.addr)
	b.start()
	b.serves()
	r.knows(0, a.addr, b.addr)
	c.start()
	c.serves()
	if err := b.move(a.addr); !errors.As(err, new(Refusal)) {
		t.Errorf("a member gets the address of another one: %v", err)
	}

	var want []string
	for _, n := range all {
		to := n.addr.As4()
		to[3] += 30
		next := netip.AddrFrom4(to)
		must(t, n.move(next))
		n.moves(next)
		n.serves()
		for _, other := range all {
			other.serves()
		}
		want = append(want, self{addr: next}.peerURL())
	}
	if got := c.peerURLs(); !slices.Equal(got, want) {
		t.Errorf("the list has %q, want %q", got, want)
	}
	a.expect("a", "b", "c")
	if is := a.identityOf(t); is != was {
		t.Errorf("the data is of %v, and was of %v", is, was)
	}
}

func (n *realNode) move(to netip.Addr) (err error) {
	eventually.That(n.rig.t, 20*time.Second, "the cluster to answer", func() error {
		err = n.Move(n.rig.t.Context(), to)
		if errors.As(err, new(Refusal)) {
			return nil
		}
		return err
	})
	return err
}

func (n *realNode) identityOf(t *testing.T) identity {
	id, ok, err := n.identity()
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	return id
}

// peerURLs are those of all members, sorted.
func (n *realNode) peerURLs() (all []string) {
	c := n.client()
	defer c.Close()
	found, err := list(n.rig.t.Context(), c)
	must(n.rig.t, err)
	for _, m := range found.Members {
		all = append(all, m.PeerURLs...)
	}
	slices.Sort(all)
	return all
}

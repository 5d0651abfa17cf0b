//go:build e2e

package etcd

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A token that one control plane makes or ends counts, or doesn't, on the other one from then on. Records of made
// tokens go by themselves; that of a token of the configuration doesn't, because the token would count again.
func TestRealTokens(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	b.start()
	b.serves()
	certify := func(n *realNode, addresses ...netip.Addr) {
		t.Helper()
		crt, key, err := r.machine.Issue(pki.Leaf{CN: n.name, DNS: []string{n.name}, IPs: addresses, Server: true, Now: time.Now()})
		must(t, err)
		must(t, secrets.API.Put(n.o.Store.As("test"), secrets.APIID, secrets.APISpec{Serving: config.CertKey{Crt: crt, Key: key}}))
	}
	certify(a)
	certify(b)

	// A worker that has joined, and whose Node an administrator deletes at once: a machine with another key may have
	// its name.
	taken := func(what string, want bool) {
		t.Helper()
		facts, err := b.Roster(t.Context())
		must(t, err)
		if err := facts.MaySign("w1", "another", netip.MustParseAddr("192.0.2.9"), false); (err != nil) != want {
			t.Errorf("%s: %v", what, err)
		}
	}
	c, err := Dial(t.Context(), a.o.Store, clientURL(a.addr))
	must(t, err)
	defer c.Close()
	must(t, a.Enlist(t.Context(), "w1", roster.Record{Key: "k1", Since: time.Now()}))
	taken("while it joins", true)
	_, err = c.Put(t.Context(), kubernetesKey+nodesKey+"w1", "{}")
	must(t, err)
	taken("when it has joined", true)
	_, err = c.Delete(t.Context(), kubernetesKey+nodesKey+"w1")
	must(t, err)
	taken("when its Node is deleted", false)

	claimedOnce(t, a, b)
	taken("who has a client certificate, and no Node", true)

	// A control plane has its addresses in its own record, where the other one reads them.
	second := netip.MustParseAddr("fd00::b")
	certify(b, b.addr, second)
	facts, err := a.Roster(t.Context())
	must(t, err)
	if err := facts.MayServe("w2", second); err != nil {
		t.Errorf("nobody has it: %v", err)
	}
	for range 2 { // the second time, nothing is to be recorded
		_, err = b.Roster(t.Context())
		must(t, err)
	}
	facts, err = a.Roster(t.Context())
	must(t, err)
	if err := facts.MayServe("w2", second); err == nil || !facts.Records["b"].Joined {
		t.Errorf("another control plane's second address is free: %+v", facts)
	}

	// A control plane doesn't join with the name of a worker.
	must(t, a.Enlist(t.Context(), "c", roster.Record{Key: "k1", Certified: true, Since: time.Now()}))
	third := node("c", config.ControlPlane)
	third.start()
	eventually.That(t, 30*time.Second, "it waits", func() error {
		return third.events.has("Waiting for the name of this node to be free: the name c belongs to a worker")
	})
	third.stop()
	b.expect("a", "b")

	const made, configured = "mmmmmm.0123456789abcdef", "cccccc.0123456789abcdef"
	admits := func(what, token string, want bool) {
		t.Helper()
		facts, err := b.Roster(t.Context())
		must(t, err)
		if facts.Admits(token, configured) != want {
			t.Errorf("%s: it counts: %t; %+v", what, !want, facts.Tokens)
		}
	}
	leases := func(id string) bool {
		t.Helper()
		got, err := c.Get(t.Context(), tokensKey+id)
		must(t, err)
		if len(got.Kvs) != 1 {
			t.Fatalf("there are %d records of %s", len(got.Kvs), id)
		}
		return clientv3.LeaseID(got.Kvs[0].Lease) != clientv3.NoLease
	}
	admits("before it is made", made, false)
	admits("that of the configuration", configured, true)
	must(t, a.EnlistToken(t.Context(), "mmmmmm", roster.NewToken(made, time.Now().Add(time.Hour)), true))
	admits("when it is made", made, true)
	must(t, a.EnlistToken(t.Context(), "mmmmmm", roster.NewToken(made, time.Now()), true))
	must(t, a.EnlistToken(t.Context(), "cccccc", roster.NewToken(configured, time.Now()), false))
	admits("when it is ended", made, false)
	admits("that of the configuration, when it is ended", configured, false)
	if !leases("mmmmmm") || leases("cccccc") {
		t.Errorf("it goes: that which was made %t, that of the configuration %t", leases("mmmmmm"), leases("cccccc"))
	}
}

// claimedOnce: two control planes that record the same machine agree, and two machines don't get one name. That of a
// machine with a client certificate counts after its grace, too.
func claimedOnce(t *testing.T, a, b *realNode) {
	t.Helper()
	facts, err := a.Roster(t.Context())
	must(t, err)
	record := func(key string, certified bool) roster.Record {
		return facts.Renewed("w1", roster.Record{Key: key, Certified: certified})
	}
	must(t, a.Enlist(t.Context(), "w1", record("k2", false)))
	must(t, b.Enlist(t.Context(), "w1", record("k2", false)))
	for what, r := range map[string]roster.Record{"another machine": record("k3", false), "a certificate that isn't recorded": record("k2", true),
		"addresses that aren't recorded": {Key: "k2", Addresses: []netip.Addr{netip.MustParseAddr("fd00::9")}}, "taints that aren't recorded": {Key: "k2", Taints: []string{"a=NoSchedule"}}} {
		if err := b.Enlist(t.Context(), "w1", r); !errors.Is(err, errRosterChanged) {
			t.Errorf("%s: %v", what, err)
		}
	}
	facts, err = b.Roster(t.Context())
	must(t, err)
	certified := record("k2", true)
	certified.Since = time.Now().Add(-2 * roster.Grace)
	must(t, b.Enlist(t.Context(), "w1", certified))
}

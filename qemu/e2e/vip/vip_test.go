//go:build e2e && long

// Package vip tests the address that three control planes share. When its
// holder loses its power, its processors or its network, another one takes the
// address. When etcd has no quorum any more, the last holder keeps it.
package vip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// controlPlanes share the address.
const controlPlanes = 3

const (
	// joinBudget is for a node to boot and to become a candidate for the address.
	joinBudget = 60 * time.Second
	// moveBudget is for another node to take the address and to serve at it. The median
	// for a killed holder must be below 5 s; etcd may have to elect a leader first.
	moveBudget = 15 * time.Second
	// leaveBudget is for a node that comes back to detect that another one has the address.
	leaveBudget = 5 * time.Second
	// cutBudget is for a node to detect that it is cut off.
	cutBudget = 20 * time.Second
	// leadBudget is for the members of etcd to agree on another leader.
	leadBudget = 20 * time.Second
	// askBudget is for one request to etcd.
	askBudget = 5 * time.Second
	// lookBudget is for a list of the addresses, which fails while they change.
	lookBudget = 5 * time.Second
	// freeBudget is how long no node may have the address during an orderly
	// handover: the next one probes for 300 ms.
	freeBudget = time.Second
	// keepTime is longer than any timeout after which a holder could leave, on any machine.
	keepTime = 10 * time.Second
)

// scenario is the cluster, and the clients that observe it.
type scenario struct {
	*e2etest.Cluster
	t      *testing.T
	shared netip.Addr
	inside *osthread.Thread
	etcd   *clientv3.Client            // of all members
	member map[string]*clientv3.Client // of one, by node
}

func (c *scenario) in(t *testing.T) *scenario {
	part := *c
	part.t, part.Cluster = t, c.Cluster.In(t)
	return &part
}

// holders are the nodes that have the address, according to this machine's kernel.
func (c *scenario) holders() []qemu.Node {
	c.t.Helper()
	var all []qemu.Node
	c.Eventually(lookBudget, "the addresses of the nodes can be read", func() (err error) { // they may change meanwhile
		all, err = c.Holders(c.shared)
		return err
	})
	return all
}

// has reports whether a node is one of them.
func (c *scenario) has(n qemu.Node) bool {
	c.t.Helper()
	return slices.ContainsFunc(c.holders(), func(o qemu.Node) bool { return o.Name == n.Name })
}

// one waits until exactly one node, not in but, has the address and serves at it.
func (c *scenario) one(budget time.Duration, but ...string) qemu.Node {
	c.t.Helper()
	began := time.Now()
	var holder qemu.Node
	c.Eventually(budget, "one node has the address", func() error {
		var all []string
		for _, n := range c.holders() {
			left := false
			for _, name := range but {
				left = left || n.Name == name
			}
			if !left {
				all, holder = append(all, n.Name), n
			}
		}
		if len(all) != 1 {
			return fmt.Errorf("it is on %q", all)
		}
		return nil
	})
	c.t.Logf("%s has the address after %s", holder.Name, time.Since(began).Round(time.Millisecond))
	c.Eventually(budget, "Kubernetes answers at the address", func() error {
		_, err := c.Try("get", "--raw", "/readyz", "--request-timeout=3s")
		return err
	})
	c.t.Logf("it serves after %s", time.Since(began).Round(time.Millisecond))
	return holder
}

// moves is one, after the holder has lost the address, within the promised time.
func (c *scenario) moves(began time.Time, but ...string) qemu.Node {
	c.t.Helper()
	is := c.one(moveBudget, but...)
	if err := c.Promised(began, time.Now(), moveBudget); err != nil {
		c.t.Errorf("until %s had the address and served at it: %v", is.Name, err)
	}
	return is
}

// leaves waits until a node doesn't have the address any more, within the promised time.
func (c *scenario) leaves(was qemu.Node, began time.Time, promise time.Duration) {
	c.t.Helper()
	c.Eventually(promise, was.Name+" leaves the address to another one", func() error {
		if c.has(was) {
			return errors.New("it has it")
		}
		return nil
	})
	end := time.Now()
	c.t.Logf("%s has left the address after %s", was.Name, end.Sub(began).Round(time.Millisecond))
	if err := c.Promised(began, end, promise); err != nil {
		c.t.Errorf("until %s had left the address: %v", was.Name, err)
	}
}

// candidates waits until all nodes are candidates for the address.
func (c *scenario) candidates(budget time.Duration, of qemu.Node) {
	c.t.Helper()
	want, addresses := fmt.Sprintf("candidates: %d\n", controlPlanes), 1
	if c.SecondShared.IsValid() {
		addresses = 2
	}
	c.Eventually(budget, "all control planes could have the address", func() error {
		out, err := c.TryGbctl("-n", of.Address.String(), "get", "vip", "-o", "yaml")
		if err == nil && strings.Count(out, want) != addresses {
			err = errors.New(out)
		}
		return err
	})
}

// share starts three control planes that share an address, and are all candidates.
func share(t *testing.T, name string, options ...e2etest.Option) *scenario {
	t.Helper()
	options = append([]e2etest.Option{e2etest.Nodes(controlPlanes, 0), func(o *qemu.Options) { o.SharedAddress = true }}, options...)
	cluster, m := e2etest.Ready(t, name, qemu.Container, options...)
	c := &scenario{Cluster: cluster, t: t, shared: cluster.Shared, inside: cluster.Network(), member: map[string]*clientv3.Client{}}
	members := c.Nodes[:controlPlanes]
	c.etcd = c.Etcd(c.inside, members...)
	for _, n := range members {
		c.member[n.Name] = c.Etcd(c.inside, n)
	}
	holder := c.one(joinBudget)
	c.candidates(joinBudget, holder)
	m.Reached("three control planes share the address")
	t.Log(c.Gbctl("-n", holder.Address.String(), "get", "vip"))
	return c
}

// Three control planes and a worker share an address of each family, which move on their own. Kubernetes and the
// machine API answer at both, before and after, and so do Services of both families.
func TestSharedAddressesOfBothFamilies(t *testing.T) {
	c := share(t, "vips", e2etest.Nodes(controlPlanes, 1), func(o *qemu.Options) { o.Second = netip.MustParsePrefix("fd00:5::/64") })
	c.moveBeside(c.Shared, c.SecondShared)
}

func TestSharedAddressOfIPv6(t *testing.T) {
	c := share(t, "vip6", e2etest.Nodes(controlPlanes, 1), func(o *qemu.Options) { o.Network = netip.MustParsePrefix("fd00:5::/64") })
	c.moveBeside(c.shared)
}

// moveBeside: each address serves, moves, and serves; and so do the Services.
func (c *scenario) moveBeside(addresses ...netip.Addr) {
	c.Web()
	c.WebAnswers()
	for _, shared := range addresses {
		c.t.Run(shared.String(), func(t *testing.T) {
			own := c.in(t)
			own.shared = shared
			own.serves()
			own.killed()
			own.serves()
		})
	}
	c.Eventually(2*e2etest.ReadyBudget, "all nodes are Ready", func() error { return c.NodesReady(c.Nodes...) })
	c.WebAnswers()
}

// serves: Kubernetes and the machine API answer at the address.
func (c *scenario) serves() {
	c.t.Helper()
	server := c.Server(c.inside, qemu.Node{Address: c.shared}).Anew(askBudget)
	c.Eventually(moveBudget, "Kubernetes answers at "+c.shared.String(), func() error {
		_, err := server.Get(c.t.Context(), "/readyz")
		return err
	})
	c.answers(c.one(moveBudget))
}

// S-115, S-116, S-119
func TestSharedAddress(t *testing.T) {
	c := share(t, "vip")
	var killed time.Duration
	t.Run("the holder loses its power", func(t *testing.T) { killed = c.in(t).killed() })
	t.Run("the holder is turned off", func(t *testing.T) { c.in(t).turnedOff(killed) })
	t.Run("the holder is frozen, and leads etcd", func(t *testing.T) { c.in(t).frozen(true) })
	t.Run("the holder is frozen, and doesn't", func(t *testing.T) { c.in(t).frozen(false) })
	t.Run("the holder is cut off", func(t *testing.T) { c.in(t).cutOff() })
	t.Run("etcd has no quorum", func(t *testing.T) { c.in(t).lastOne() })
}

// killed returns how long it took until another node had the address.
func (c *scenario) killed() time.Duration {
	was := c.one(moveBudget)
	seen := c.watch()
	began := time.Now()
	c.must(c.Cut(c.t.Context(), was.Name))
	is := c.moves(began)
	if is.Name == was.Name {
		c.t.Fatalf("%s has the address, and no power", was.Name)
	}
	took := seen.when(is, true).Sub(began)
	c.must(c.On(c.t.Context(), was.Name))
	c.candidates(joinBudget, is)
	seen.moved(was, is)
	return took
}

// turnedOff: the holder hands the address over, and then ends. The members of etcd
// share this machine's disk, which may stall at that moment, so there are two attempts.
func (c *scenario) turnedOff(killed time.Duration) {
	if err := c.handsOver(killed); err != nil {
		c.t.Logf("once more: %v", err)
		if err := c.handsOver(killed); err != nil {
			c.t.Error(err)
		}
	}
}

// handsOver returns an error if no node had the address for too long. The
// machine API answers at the address, before and after.
func (c *scenario) handsOver(killed time.Duration) (late error) {
	was := c.one(moveBudget)
	c.answers(was)
	seen := c.watch()
	began := time.Now()
	c.must(c.Off(c.t.Context(), was.Name))
	ended := time.Now()
	is := c.one(moveBudget)
	released, taken := seen.when(was, false), seen.when(is, true)
	free := taken.Sub(released)
	c.t.Logf("the address was released %s after the power button, and nobody's for %s; the node ended after %s. A killed one's was nobody's for %s",
		released.Sub(began).Round(time.Millisecond), free.Round(time.Millisecond), ended.Sub(began).Round(time.Millisecond), killed.Round(time.Millisecond))
	if !taken.Before(ended) {
		late = errors.New("no other node had the address before its holder ended")
	}
	if err := c.Promised(released, taken, freeBudget); err != nil || free > killed/2 {
		late = errors.Join(late, fmt.Errorf("the address was nobody's for %s: %w", free, err))
	}
	c.answers(is)
	c.must(c.On(c.t.Context(), was.Name))
	c.candidates(joinBudget, is)
	seen.moved(was, is)
	return late
}

// answers: the holder's machine API answers at the address.
func (c *scenario) answers(holder qemu.Node) {
	c.t.Helper()
	c.Eventually(moveBudget, holder.Name+" answers gbctl at the address", func() error {
		out, err := c.Inside(c.inside).TryGbctl("-n", c.shared.String(), "version")
		if err == nil && !slices.Contains(strings.Fields(out), holder.Name) {
			err = errors.New(out)
		}
		return err
	})
}

// leads makes a node etcd's leader, or another one.
func (c *scenario) leads(n qemu.Node, leads bool) {
	c.t.Helper()
	c.Eventually(leadBudget, fmt.Sprintf("%s leads etcd: %t", n.Name, leads), func() error {
		now, err := c.Leader(c.etcd)
		if err != nil || (now.Name == n.Name) == leads {
			return err
		}
		if leads {
			err = c.lead(now, n)
		} else {
			_, err = c.TryGbctl("-n", now.Address.String(), "etcd", "forfeit-leadership")
		}
		return errors.Join(fmt.Errorf("%s led", now.Name), err)
	})
}

// lead transfers etcd's leadership from one node to another.
func (c *scenario) lead(from, to qemu.Node) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), eventually.Scale(askBudget))
	defer cancel()
	members, err := c.etcd.MemberList(ctx)
	if err != nil {
		return err
	}
	for _, m := range members.Members {
		if m.Name == to.Name {
			_, err := c.member[from.Name].MoveLeader(ctx, m.ID)
			return err
		}
	}
	return fmt.Errorf("%s is no member: %v", to.Name, members.Members)
}

// leases are those of the candidates, from etcd on a node.
func (c *scenario) leases(n qemu.Node) []int64 {
	c.t.Helper()
	var all []int64
	c.Eventually(leadBudget, "etcd answers", func() error {
		ctx, cancel := context.WithTimeout(c.t.Context(), eventually.Scale(askBudget))
		defer cancel()
		got, err := c.member[n.Name].Get(ctx, fmt.Sprintf("/garboard.dev/shared-address/%s/candidates/", c.shared), clientv3.WithPrefix())
		if err != nil {
			return err
		}
		all = nil
		for _, kv := range got.Kvs {
			all = append(all, kv.Lease)
		}
		return nil
	})
	return all
}

// frozen returns whether etcd ended the leases of the others when the holder
// was back: a leader that was frozen treats them as expired.
func (c *scenario) frozen(leads bool) (ended bool) {
	was := c.one(moveBudget)
	c.leads(was, leads)
	seen := c.watch()
	began := time.Now()
	c.must(c.Freeze(c.t.Context(), was.Name))
	is := c.moves(began, was.Name) // its kernel still has it
	if !c.has(was) {
		c.t.Error("the frozen node has let the address go: nothing was tried")
	}
	before := c.leases(is)
	c.must(c.Thaw(c.t.Context(), was.Name))
	c.leaves(was, time.Now(), leaveBudget)
	c.candidates(joinBudget, is)
	seen.moved(was, is)
	after := c.leases(is)
	ended = !slices.ContainsFunc(before, func(l int64) bool { return slices.Contains(after, l) })
	c.t.Logf("etcd ended the leases of the others: %t", ended)
	return ended
}

func (c *scenario) cutOff() {
	was := c.one(moveBudget)
	seen := c.watch()
	began := time.Now()
	c.must(c.SetNetwork(c.t.Context(), was.Name, network.Conditions{Off: true}))
	is := c.moves(began, was.Name)
	c.leaves(was, began, cutBudget)
	c.must(c.SetNetwork(c.t.Context(), was.Name, network.Conditions{}))
	c.candidates(joinBudget, is)
	seen.moved(was, is)
}

// lastOne leaves only the holder: it keeps the address, though etcd has no quorum.
// When its API server is gone, too, nothing answers, and doctor reports that.
func (c *scenario) lastOne() {
	holder := c.one(moveBudget)
	for _, n := range c.Nodes {
		if n.Name != holder.Name {
			c.must(c.Cut(c.t.Context(), n.Name))
		}
	}
	at := holder.Address.String()
	c.Eventually(moveBudget, "the holder knows that etcd doesn't answer", func() error {
		out, err := c.TryGbctl("-n", at, "get", "vip", "-o", "yaml")
		if err == nil && !strings.Contains(out, "known: false") {
			err = errors.New(out)
		}
		return err
	})
	began := time.Now()
	c.Eventually(2*keepTime, "the last holder keeps the address", func() error {
		if !c.has(holder) {
			c.t.Fatalf("it doesn't have it any more:\n%s", c.Gbctl("-n", at, "get", "vip", "-o", "yaml"))
		}
		if _, err := c.Try("get", "--raw", "/readyz?exclude=etcd&exclude=etcd-readiness"); err != nil {
			return err
		}
		if kept := time.Since(began); kept < keepTime {
			return fmt.Errorf("for %s so far", kept)
		}
		return nil
	})
	c.must(c.Kill("kube-apiserver"))
	c.Eventually(joinBudget, "the doctor says that nobody serves at the address", func() error {
		out, err := c.TryGbctl("-n", at, "doctor")
		if !strings.Contains(out, "shared-address-not-served") {
			err = errors.Join(err, errors.New(out))
			return err
		}
		return nil
	})
	if out, err := c.Try("get", "--raw", "/readyz?exclude=etcd&exclude=etcd-readiness", "--request-timeout=3s"); err == nil {
		c.t.Errorf("somebody answers at the address: %s", out)
	}
}

func (c *scenario) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

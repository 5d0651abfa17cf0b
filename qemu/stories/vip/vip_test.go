//go:build story

// Package vip is the story of the address that three control planes share: whoever
// has it may lose its power, its time or its network, and another one has it; when
// etcd has no quorum any more, its last holder keeps it.
package vip

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
)

func TestMain(m *testing.M) { story.Main(m) }

const (
	// joinBudget is for a node to boot and to be one of those that can have the address.
	joinBudget = 60 * time.Second
	// moveBudget is for another node to have the address and to serve at it. The median
	// for a killed holder is to be below 5 s; etcd may have to elect a leader first.
	moveBudget = 15 * time.Second
	// leaveBudget is for one that comes back to find out that another has the address.
	leaveBudget = 5 * time.Second
	// cutBudget is for one that is cut off to find out that it is.
	cutBudget = 20 * time.Second
	// keepTime is longer than all that could make a holder leave, on any machine.
	keepTime = 10 * time.Second
)

// tale is the cluster, and what it is asked all the time.
type tale struct {
	*story.Cluster
	t      *testing.T
	shared netip.Addr
	mark   *story.Mark
}

func (c *tale) in(t *testing.T) *tale {
	part := *c
	part.t, part.Cluster = t, c.Cluster.In(t)
	return &part
}

// holders are the nodes that have the address, as this machine's kernel sees it.
func (c *tale) holders() []qemu.Node {
	c.t.Helper()
	all, err := c.Holders(c.shared)
	if err != nil {
		c.t.Fatal(err)
	}
	return all
}

// has says whether a node is one of them.
func (c *tale) has(n qemu.Node) bool {
	c.t.Helper()
	return slices.ContainsFunc(c.holders(), func(o qemu.Node) bool { return o.Name == n.Name })
}

// one waits until exactly one node has the address, none of but, and serves at it.
func (c *tale) one(budget time.Duration, but ...string) qemu.Node {
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

// candidates waits until all nodes could have the address.
func (c *tale) candidates(budget time.Duration, of qemu.Node) {
	c.t.Helper()
	want := fmt.Sprintf("candidates: %d\n", len(c.Nodes))
	c.Eventually(budget, "all control planes could have the address", func() error {
		out, err := c.TryGbctl("-n", of.Address.String(), "get", "vip", "-o", "yaml")
		if err == nil && !strings.Contains(out, want) {
			err = errors.New(out)
		}
		return err
	})
}

// S-115, S-116
func TestSharedAddress(t *testing.T) {
	story.Built(t, qemu.Container)
	m := story.Marks(t)
	cluster := story.New(t, "vip", qemu.Container, func(o *qemu.Options) { o.ControlPlanes, o.SharedAddress = 3, true })
	m.Reached("power is on")
	c := &tale{Cluster: cluster, t: t, shared: cluster.Shared, mark: m}
	c.Ready(m)
	holder := c.one(joinBudget)
	c.candidates(joinBudget, holder)
	m.Reached("three control planes share the address")
	t.Log(c.Gbctl("-n", holder.Address.String(), "get", "vip"))

	t.Run("the holder loses its power", func(t *testing.T) { c.in(t).killed() })
	t.Run("the holder is frozen", func(t *testing.T) { c.in(t).frozen() })
	t.Run("the holder is cut off", func(t *testing.T) { c.in(t).cutOff() })
	t.Run("etcd has no quorum", func(t *testing.T) { c.in(t).lastOne() })
}

func (c *tale) killed() {
	was := c.one(moveBudget)
	c.must(c.Cut(c.t.Context(), was.Name))
	is := c.one(moveBudget)
	if is.Name == was.Name {
		c.t.Fatalf("%s has the address, and no power", was.Name)
	}
	c.must(c.On(c.t.Context(), was.Name))
	c.candidates(joinBudget, is)
	c.stays(is)
}

func (c *tale) frozen() {
	was := c.one(moveBudget)
	c.must(c.Freeze(c.t.Context(), was.Name))
	is := c.one(moveBudget, was.Name) // its kernel still has it
	if !c.has(was) {
		c.t.Error("the frozen node has let the address go: nothing was tried")
	}
	c.must(c.Thaw(c.t.Context(), was.Name))
	began := time.Now()
	c.Eventually(leaveBudget, "the thawed node leaves the address to the other", func() error {
		if all := c.holders(); len(all) != 1 || all[0].Name != is.Name {
			return fmt.Errorf("it is on %v", all)
		}
		return nil
	})
	c.t.Logf("it has left the address after %s", time.Since(began).Round(time.Millisecond))
	c.candidates(joinBudget, is)
	c.stays(is)
}

func (c *tale) cutOff() {
	was := c.one(moveBudget)
	c.must(c.SetNetwork(c.t.Context(), was.Name, qemu.Network{Off: true}))
	is := c.one(moveBudget, was.Name)
	c.Eventually(cutBudget, "the one that is cut off gives the address up", func() error {
		if c.has(was) {
			return errors.New("it has it")
		}
		return nil
	})
	c.must(c.SetNetwork(c.t.Context(), was.Name, qemu.Network{}))
	c.candidates(joinBudget, is)
	c.stays(is)
}

// stays fails if the address isn't where it was. It is to move only when it must.
func (c *tale) stays(holder qemu.Node) {
	c.t.Helper()
	now := c.one(moveBudget)
	if now.Name == holder.Name {
		return
	}
	c.t.Errorf("the address went from %s to %s for nothing", holder.Name, now.Name)
	for _, n := range c.Nodes {
		c.t.Logf("%s:\n%s", n.Name, c.Gbctl("-n", n.Address.String(), "logs", "vip"))
	}
}

// lastOne leaves the holder alone: it keeps the address, though etcd has no quorum.
// When its API server is gone, too, nobody answers, and the doctor says so.
func (c *tale) lastOne() {
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

func (c *tale) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

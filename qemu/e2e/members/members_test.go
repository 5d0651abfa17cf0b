//go:build e2e

// Package members tests one cluster that grows and shrinks, and whose control planes share an
// address. The long tests of packages vip, scale, reset and threenodes do each of that in more
// ways, and measure it.
package members

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// growBudget is for two nodes to boot, to join one after the other, and to be Ready.
	growBudget = 90 * time.Second
	// moveBudget is for another node to take the address and to serve at it. etcd may have to
	// elect a leader first.
	moveBudget = 15 * time.Second
	// waitBudget is for a node to boot, and to find nobody to join.
	waitBudget = 60 * time.Second
	// restoreBudget is for one command, and serveBudget for etcd and then the API server to start.
	restoreBudget = 90 * time.Second
	serveBudget   = 30 * time.Second
	// resetBudget is for a node to be emptied, to leave and to be wiped.
	resetBudget = 60 * time.Second
	// writeBudget is for the load balancer to close connections to a node that has left.
	writeBudget = 20 * time.Second
	checkBudget = 60 * time.Second
	// writePeriod is a small load: the machine has other tests.
	writePeriod = 100 * time.Millisecond
)

type members struct {
	*e2etest.Cluster
	m    *e2etest.Mark
	etcd *clientv3.Client
}

func TestControlPlanesComeAndGo(t *testing.T) {
	cluster, m := e2etest.Ready(t, "members", qemu.Container, func(o *qemu.Options) {
		o.ControlPlanes, o.Later, o.SharedAddress = 3, 2, true
	})
	c := &members{cluster, m, cluster.Etcd(cluster.Network(), cluster.Nodes...)}
	c.grows(c.Nodes[1:])          // S-214
	killed := c.moves()           // S-115
	left := c.losesAllBut(killed) // S-371
	c.grows(slices.DeleteFunc(slices.Clone(c.Nodes), func(n qemu.Node) bool { return n.Name == left.Name }))
	c.Kubectl("get", "configmap", "before", "again")
	c.shrinks(left) // S-180, S-219
}

// settled: these nodes are Ready, and their members are all that etcd has.
func (c *members) settled(nodes ...qemu.Node) {
	c.T().Helper()
	c.Eventually(growBudget, fmt.Sprintf("%d are Ready and vote", len(nodes)), func() error {
		return errors.Join(c.NodesReady(nodes...), c.InSync(c.etcd, nodes...))
	})
	c.m.Reached(fmt.Sprintf("%d control planes are Ready, and vote", len(nodes)))
}

// must ends the test at an error.
func (c *members) must(errs ...error) {
	c.T().Helper()
	if err := errors.Join(errs...); err != nil {
		c.T().Fatal(err)
	}
}

// grows: nodes that are turned on join.
func (c *members) grows(by []qemu.Node) {
	c.T().Helper()
	for _, n := range by {
		c.must(c.On(c.T().Context(), n.Name))
	}
	c.settled(c.Nodes...)
}

// holder waits until exactly one node, and not this one, has the shared address and serves at it.
func (c *members) holder(but qemu.Node) (holder qemu.Node) {
	c.T().Helper()
	c.Eventually(moveBudget, "one node has the address, and Kubernetes answers there", func() error {
		all, err := c.Holders(c.Shared)
		if err == nil && (len(all) != 1 || all[0].Name == but.Name) {
			err = fmt.Errorf("it is on %v", all)
		}
		if err == nil {
			holder = all[0]
			_, err = c.Try("get", "--raw", "/readyz", "--request-timeout=3s")
		}
		return err
	})
	return holder
}

// moves: the holder of the shared address loses its power, and another node has the address. The
// holder stays off.
func (c *members) moves() (killed qemu.Node) {
	c.T().Helper()
	c.Complete()
	killed = c.holder(qemu.Node{})
	c.must(c.Cut(c.T().Context(), killed.Name))
	is := c.holder(killed)
	c.m.Reached(fmt.Sprintf("%s has the address of %s, which has no power", is.Name, killed.Name))
	return killed
}

// losesAllBut: a second control plane of three is lost. The third one begins a new cluster with a
// snapshot. It returns that one.
func (c *members) losesAllBut(killed qemu.Node) (left qemu.Node) {
	t := c.T()
	t.Helper()
	others := slices.DeleteFunc(slices.Clone(c.Nodes), func(n qemu.Node) bool { return n.Name == killed.Name })
	lost, left := others[0], others[1]
	node := func(args ...string) (string, error) {
		return c.Patient(restoreBudget).TryGbctl(append([]string{"-n", left.Address.String()}, args...)...)
	}
	c.Kubectl("create", "configmap", "before")
	snapshot := filepath.Join(t.TempDir(), "etcd.db")
	_, err := node("etcd", "snapshot", snapshot)
	c.must(err)
	c.Kubectl("create", "configmap", "after")

	data := func(n qemu.Node, parts ...string) string {
		return filepath.Join(append([]string{c.Dir(), n.Name, "var"}, parts...)...)
	}
	c.must(c.Cut(t.Context(), lost.Name), os.RemoveAll(data(lost)), os.RemoveAll(data(killed)))
	c.must(c.Cut(t.Context(), left.Name), os.RemoveAll(data(left, "lib", "etcd")), c.On(t.Context(), left.Name))
	c.Eventually(waitBudget, "the last one waits, with nobody to join", func() error {
		if out, err := node("service", "etcd"); err != nil || !strings.Contains(out, "Waiting for") || !strings.Contains(out, "its data is gone") {
			return fmt.Errorf("service etcd: %w\n%s", err, out)
		}
		return nil
	})
	c.m.Reached("two of three are lost, and the third one's data")
	out, err := node("bootstrap", "--recover-from", snapshot)
	if err != nil || !strings.Contains(out, "a new cluster begins") {
		t.Fatalf("%v: %s", err, out)
	}
	c.Eventually(serveBudget, "Kubernetes has what was in the snapshot", func() error {
		_, err := c.Try("get", "configmap", "before")
		return err
	})
	if out, err := c.Try("get", "configmap", "after"); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("what was written after the snapshot: %v: %s", err, out)
	}
	c.Kubectl("create", "configmap", "again")
	c.m.Reached("the third one has begun a new cluster")
	return left
}

// shrinks: all but one leave on request, while a client writes. They are wiped, and nothing that
// was acknowledged is lost.
func (c *members) shrinks(to qemu.Node) {
	t := c.T()
	t.Helper()
	store := e2etest.KubernetesStore(c.Endpoint())
	store.Every = writePeriod
	w := c.Write(store)
	left := slices.Clone(c.Nodes)
	for _, n := range c.Nodes {
		if n.Name == to.Name {
			continue
		}
		left = slices.DeleteFunc(left, func(o qemu.Node) bool { return o.Name == n.Name })
		t.Log(c.Patient(resetBudget).Gbctl("-n", n.Address.String(), "reset", "--yes"))
		c.settled(left...)
		w.Goes(writeBudget, "after "+n.Name+" has left")
		c.Eventually(resetBudget, n.Name+" is wiped", func() error { return c.wiped(n) })
	}
	w.Stop()
	w.Complete(checkBudget, map[string]func(context.Context) (map[string]string, error){"the API server": w.Read})
	out, err := c.TryGbctl("-n", to.Address.String(), "reset", "--yes")
	if err == nil || !strings.Contains(err.Error(), "it is the last voting member") { // S-185
		t.Errorf("the last one would leave: %v\n%s", err, out)
	}
}

// wiped returns nil if a node has nothing of the cluster on its disk.
func (c *members) wiped(n qemu.Node) error {
	for dir, want := range map[string]string{"state": "reset", "var": ""} {
		entries, err := os.ReadDir(filepath.Join(c.Dir(), n.Name, dir))
		if err != nil {
			return err
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if got := strings.Join(names, " "); got != want {
			return fmt.Errorf("in %s are %q", dir, got)
		}
	}
	return nil
}

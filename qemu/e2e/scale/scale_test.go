//go:build e2e && long

// Package scale tests a cluster whose control planes are added and removed while clients
// write to it: one, three, five, and three again, without the one that bootstrapped it.
package scale

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// scaleBudget is for two nodes to boot, to join one after the other, and to be Ready.
	scaleBudget = 90 * time.Second
	// resetBudget is for a node to be emptied, to leave and to be wiped.
	resetBudget = 60 * time.Second
	// checkBudget is for a list of all writes, on busy machines.
	checkBudget = 60 * time.Second
	// writeBudget is for the load balancer to close connections to a node that has left.
	writeBudget = 20 * time.Second
)

// S-214, S-219: nodes join when they are turned on, and leave on request; the
// first has no special role.
func TestOneThreeFiveThree(t *testing.T) {
	c, m := e2etest.Ready(t, "scale", qemu.Container, func(o *qemu.Options) { o.ControlPlanes, o.Later = 5, 4 })
	inside := c.Network()
	etcd := c.Etcd(inside, c.Nodes...)
	w := c.Write(e2etest.KubernetesStore(c.Endpoint()))
	settled := func(nodes []qemu.Node) {
		t.Helper()
		c.Eventually(scaleBudget, fmt.Sprintf("%d are Ready and vote", len(nodes)), func() error {
			return errors.Join(c.NodesReady(nodes...), c.InSync(etcd, nodes...))
		})
		m.Reached(fmt.Sprintf("%d control planes are Ready, and vote", len(nodes)))
		w.Goes(writeBudget, fmt.Sprintf("until %d voted", len(nodes)))
	}
	settled(c.Nodes[:1])
	for _, size := range []int{3, 5} {
		for _, n := range c.Nodes[size-2 : size] {
			if err := c.On(t.Context(), n.Name); err != nil {
				t.Fatal(err)
			}
		}
		settled(c.Nodes[:size])
	}

	left := slices.Clone(c.Nodes)
	for range 2 {
		leaves := left[0]
		left = left[1:]
		t.Log(c.Patient(resetBudget).Gbctl("-n", leaves.Address.String(), "reset", "--yes"))
		settled(left)
	}

	// The twin: a node that has left is turned on again, and joins no cluster.
	gone := c.Nodes[0]
	said := len(c.Text())
	if err := c.On(t.Context(), gone.Name); err != nil {
		t.Fatal(err)
	}
	c.Says(scaleBudget, said, "no usable configuration")
	m.Reached(gone.Name + " is on again, and waits for a configuration")
	settled(left)

	w.Stop()
	copies := map[string]func(context.Context) (map[string]string, error){}
	for _, n := range left {
		copies["the API server on "+n.Name] = e2etest.KubernetesStore(c.Server(inside, n)).Read
	}
	w.Complete(checkBudget, copies)
}

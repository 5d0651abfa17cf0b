//go:build e2e && long

package threenodes

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// No one command takes down a quorum: neither a wrong argument of etcd that is given to all
// control planes at once, nor a stop of etcd on all of them.
func TestOneCommandKeepsTheQuorum(t *testing.T) {
	c, m := e2etest.Shared(t, name, qemu.Container, e2etest.Nodes(3, 0))
	var all []string
	for _, n := range c.Nodes {
		all = append(all, n.Address.String())
	}
	first, every := all[0], strings.Join(all, ",")
	healthy := func() {
		c.Eventually(joinBudget, "all nodes are healthy", func() error { _, err := c.TryGbctl("-n", every, "health"); return err })
	}
	healthy()
	writes := func(what string) {
		c.Eventually(electBudget, "Kubernetes takes a write "+what, func() error { return c.TryWrite("create", "configmap", what) })
	}

	t.Run("an argument that etcd refuses", func(t *testing.T) {
		c := c.In(t)
		out, err := c.TryGbctl("-n", every, "patch", "mc", "--wait", "10s", "-p", `cluster: {etcd: {extraArgs: {quota-backend-bytes: "nonsense"}}}`)
		if err == nil || !strings.Contains(fmt.Sprint(out, err), first+" isn't healthy after the change") {
			t.Errorf("patch of all nodes: %v\n%s", err, out)
		}
		for _, n := range all[1:] {
			if text := c.Gbctl("-n", n, "get", "mc", "-o", "yaml"); strings.Contains(text, "nonsense") {
				t.Errorf("node %s has got it too", n)
			}
		}
		writes("with-a-bad-argument")
		c.Gbctl("-n", first, "config", "rollback")
		healthy()
	})
	m.Reached("the argument is taken back")
	t.Run("a stop of all members", func(t *testing.T) {
		c := c.In(t)
		out, err := c.TryGbctl("-n", every, "service", "etcd", "stop")
		if text := fmt.Sprint(out, err); err == nil || strings.Count(text, "service etcd is stopped") != 1 || strings.Count(text, "would lose its quorum") != 2 {
			t.Errorf("stop of all members: %v\n%s", err, out)
		}
		writes("with-a-stopped-member")
		c.Gbctl("-n", first, "service", "etcd", "start")
		healthy()
	})
	m.Reached("the stopped member is back")
	// All at the same time: the lock of the cluster keeps them apart.
	t.Run("stops at the same time", func(t *testing.T) {
		c := c.In(t)
		ended := make(chan error)
		for _, n := range all {
			go func() {
				_, err := c.Patient(time.Minute).TryGbctl("-n", n, "service", "etcd", "stop")
				ended <- err
			}()
		}
		stopped := 0
		for range all {
			if err := <-ended; err == nil {
				stopped++
			}
		}
		if stopped != 1 {
			t.Errorf("%d of 3 members were stopped at the same time, not 1", stopped)
		}
		writes("after-stops-at-the-same-time")
		for _, n := range all {
			c.Gbctl("-n", n, "service", "etcd", "start")
		}
		healthy()
	})
	// --force does it all the same.
	t.Run("by force", func(t *testing.T) {
		c := c.In(t)
		for _, n := range all {
			c.Gbctl("-n", n, "service", "etcd", "stop", "--force")
		}
		for _, n := range all {
			c.Gbctl("-n", n, "service", "etcd", "start")
		}
		healthy()
		c.Kubectl("get", "configmap", "after-stops-at-the-same-time")
	})
}

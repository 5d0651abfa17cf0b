//go:build e2e && long

package threenodes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// noticeBudget is for etcd to detect the loss of its leader, and for doctor to ask it.
	noticeBudget = 30 * time.Second
	// serveBudget is for a control plane to boot, and its API server to serve.
	serveBudget = 60 * time.Second
	// againBudget is for etcd, and then the API server, to start on a running node.
	// When a kubelet had to wait for answers of missing API servers, that took 140 s.
	againBudget = 30 * time.Second
	// restoreBudget is for one command, the longest that there is.
	restoreBudget = 90 * time.Second
	// rejoinBudget is for two nodes to boot, to pull their images again, to join and to
	// be promoted.
	rejoinBudget = 90 * time.Second
)

// A cluster has lost two of three control planes: the third begins a new one
// with a snapshot, and the others join again with empty disks.
func TestRecoverFromSnapshot(t *testing.T) {
	c, m := e2etest.Shared(t, name, qemu.Container, e2etest.Nodes(3, 0))
	last := c.Nodes[0]
	node := func(args ...string) (string, error) {
		return c.TryGbctl(append([]string{"-n", last.Address.String()}, args...)...)
	}
	c.Eventually(rejoinBudget, "three members vote", voters(c, last, 3))
	c.Kubectl("create", "configmap", "before")
	snapshot := filepath.Join(t.TempDir(), "etcd.db")
	c.Gbctl("-n", last.Address.String(), "etcd", "snapshot", snapshot)
	c.Kubectl("create", "configmap", "after")
	refused := func(says string, args ...string) {
		t.Helper()
		if out, err := node(args...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("gbctl %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	refused("isn't empty", "bootstrap", "--recover-from", snapshot)

	for _, lost := range c.Nodes[1:] {
		must(t, c.Cut(t.Context(), lost.Name))
		must(t, os.RemoveAll(filepath.Join(c.Dir(), lost.Name, "var")))
	}
	m.Reached("two of three are lost")
	c.Eventually(noticeBudget, "etcd says that it has no quorum", func() error {
		out, err := node("etcd", "status")
		if err == nil && (strings.Count(out, "no answer") != 2 || strings.Contains(out, " leader ")) {
			err = fmt.Errorf("etcd status:\n%s", out)
		}
		return err
	})
	c.Eventually(noticeBudget, "the doctor says so, and what to do", func() error {
		if out, err := node("doctor"); !strings.Contains(out, "recover the cluster from a snapshot") {
			return fmt.Errorf("doctor: %w\n%s", err, out)
		}
		return nil
	})
	must(t, c.Cut(t.Context(), last.Name))
	must(t, os.RemoveAll(filepath.Join(c.Dir(), last.Name, "var", "lib", "etcd")))
	must(t, c.On(t.Context(), last.Name))
	waits := func() error {
		if out, err := node("service", "etcd"); err != nil || !strings.Contains(out, "Waiting for") || !strings.Contains(out, "its data is gone") {
			return fmt.Errorf("service etcd: %w\n%s", err, out)
		}
		return nil
	}
	c.Eventually(serveBudget, "the last one waits, with nobody to join", waits)

	t.Run("a damaged snapshot changes nothing", func(t *testing.T) {
		content, err := os.ReadFile(snapshot)
		must(t, err)
		content[len(content)/2] ^= 1
		damaged := filepath.Join(t.TempDir(), "damaged.db")
		must(t, os.WriteFile(damaged, content, 0o600))
		refused("damaged", "bootstrap", "--recover-from", damaged)
		must(t, waits())
	})
	t.Run("the snapshot begins a new cluster", func(t *testing.T) {
		c := c.In(t)
		// The service may have just begun to look for the others again, which can
		// take longer than one command may.
		out, err := c.Patient(restoreBudget).TryGbctl("-n", last.Address.String(), "bootstrap", "--recover-from", snapshot)
		if err != nil || !strings.Contains(out, "a new cluster begins") {
			t.Fatalf("%v: %s", err, out)
		}
		m.Reached("restored")
		c.Eventually(againBudget, "Kubernetes has what was in it", func() error {
			_, err := c.Try("get", "configmap", "before")
			return err
		})
		if out, err := c.Try("get", "configmap", "after"); err == nil || !strings.Contains(err.Error(), "not found") {
			t.Errorf("what was written after the snapshot: %v: %s", err, out)
		}
		c.Kubectl("create", "configmap", "again")
		m.Reached("Kubernetes takes writes")
		if out, err := node("bootstrap", "--recover-from", snapshot); err != nil || !strings.Contains(out, "nothing is to be done") {
			t.Errorf("once more: %v: %s", err, out)
		}
	})
	t.Run("the lost ones come back empty, and join", func(t *testing.T) {
		c := c.In(t)
		for _, lost := range c.Nodes[1:] {
			must(t, c.On(t.Context(), lost.Name))
		}
		c.Eventually(rejoinBudget, "three members vote", voters(c, last, 3))
		m.Reached("three members vote")
		c.Ready(m)
		c.Kubectl("get", "configmap", "before", "again")
	})
}

// voters waits for that many members, one of which is the leader.
func voters(c *e2etest.Cluster, node qemu.Node, n int) func() error {
	return func() error {
		out, err := c.TryGbctl("-n", node.Address.String(), "etcd", "status")
		if err == nil && (strings.Count(out, "follower") != n-1 || strings.Count(out, "leader") != 1) {
			err = errors.New(out)
		}
		return err
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

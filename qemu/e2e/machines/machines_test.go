//go:build e2e && long

// Package machines tests a cluster of virtual machines, with disks and addresses from
// DHCP: a worker runs before the cluster exists, the control plane bootstraps the cluster
// on request, and only once, the worker joins, and both are reset at the same time.
//
// Two control planes are tested with containers: emulated on two busy cores,
// each was so slow that the other's etcd lost its leader again and again.
package machines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// Budgets are for native speed; package e2etest scales them.
	waitBudget  = 45 * time.Second // to boot and pull the image of etcd, two at the same time
	againBudget = 90 * time.Second // to serve again after a reset of all
	memoryMiB   = 2048             // of a control plane
)

// S-212, S-330, S-331, S-333.
func TestMachines(t *testing.T) {
	var said strings.Builder
	c, m := e2etest.Start(t, "machines", qemu.QEMU, func(o *qemu.Options) {
		o.Workers, o.MemoryMiB, o.Out, o.Prepare = 1, memoryMiB, &said, waits
	})
	_, steps, _ := strings.Cut(said.String(), "\n") // after the choice, which depends on this machine
	want := []string{
		"validating CIDR and reserving IPs", "generating PKI and tokens", fmt.Sprintf("creating state directory in %q", c.Dir()),
		"creating network machines", "creating load balancer", "creating dhcpd", "creating control plane nodes", "creating worker nodes", "",
	}
	if diff := cmp.Diff(strings.Join(want, "\n"), steps); diff != "" {
		t.Errorf("what is said (-want +got):\n%s", diff)
	}

	// Both wait, and report for what.
	controlPlane, worker := c.Nodes[0], c.Nodes[1]
	yields(t, worker)
	says(c, controlPlane, "Waiting for bootstrap, or for a control plane to join at https://10.5.0.1:6443")
	m.Reached("the control plane waits")
	says(c, worker, "no control plane signs a certificate for the machine API")
	m.Reached("the worker waits")
	tells := func(part string) {
		t.Helper()
		c.Eventually(waitBudget, "bootstrap of "+controlPlane.Name, func() error {
			out, err := c.TryGbctl("bootstrap", "-n", controlPlane.Address.String())
			if err != nil {
				out = err.Error()
			}
			if !strings.Contains(out, part) {
				return errors.New(strings.TrimSpace(out))
			}
			return nil
		})
	}
	tells("the cluster begins on this node")
	tells("begun on this node already")
	c.Ready(m)
	tells("begun on this node already")
	if members := c.Gbctl("etcd", "members", "-n", controlPlane.Address.String()); strings.Count(members, " yes ") != 1 {
		t.Errorf("members of etcd:\n%s", members)
	}
	c.Eventually(waitBudget, "the worker's machine API serves", func() error {
		_, err := c.TryGbctl("version", "-n", worker.Address.String())
		return err
	})
	m.Reached("the worker's machine API serves")

	before := identity(c)
	for _, n := range c.Nodes {
		if err := c.Cut(t.Context(), n.Name); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range c.Nodes {
		if err := c.On(t.Context(), n.Name); err != nil {
			t.Fatal(err)
		}
	}
	yields(t, worker)
	m.Reached("both were reset")
	c.Eventually(againBudget, "the API answers again", func() error {
		_, err := c.Try("get", "--raw", "/readyz")
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(c.Scale(againBudget)))
	defer cancel()
	if err := c.WaitReady(ctx, func(s qemu.Milestone) { m.Reached(s.What + " again") }, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, identity(c)); diff != "" {
		t.Errorf("what was there before the reset (-before +after):\n%s", diff)
	}
}

// yields lowers the priority of a node: with two emulated nodes on two
// processors, a worker that only waits used as much as the control plane, whose
// API then took ten minutes instead of three.
func yields(t *testing.T, n qemu.Node) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	threads := 0
	for _, path := range all {
		// A thread that has ended meanwhile has none.
		if data, _ := os.ReadFile(path); !bytes.HasPrefix(data, []byte("qemu-system")) || !bytes.Contains(data, []byte("\x00machines/"+n.Name+"\x00")) {
			continue
		}
		tasks, err := filepath.Glob(filepath.Join(filepath.Dir(path), "task", "[0-9]*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			id, err := strconv.Atoi(filepath.Base(task))
			if err == nil {
				err = syscall.Setpriority(syscall.PRIO_PROCESS, id, 19)
			}
			if err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Fatalf("thread %s: %v", task, err)
			}
			threads++
		}
	}
	if threads < 2 {
		t.Fatalf("%d threads of %s's QEMU were found", threads, n.Name)
	}
}

// waits makes the first node one that doesn't begin by itself.
func waits(dir string) error {
	path := filepath.Join(dir, "config.yaml")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, bytes.Replace(data, []byte(" type: init\n"), []byte(" type: controlplane\n"), 1), 0o600)
}

// says waits for words on a node's console.
func says(c *e2etest.Cluster, n qemu.Node, words string) {
	c.T().Helper()
	c.Eventually(waitBudget, n.Name+" waits, and says so", func() error {
		text, err := os.ReadFile(c.Console(n.Name))
		if err == nil && !strings.Contains(string(text), words) {
			err = fmt.Errorf("it hasn't said %q yet", words)
		}
		return err
	})
}

// identity identifies the cluster and its nodes.
func identity(c *e2etest.Cluster) string {
	return c.Kubectl("get", "namespace/kube-system", "node/"+c.Nodes[0].Name, "node/"+c.Nodes[1].Name, "-o", "jsonpath={.items[*].metadata.uid}")
}

//go:build story && long

// Package machines is the story of two control planes that are virtual machines, with
// disks and addresses from DHCP: neither begins by itself, one is told to and the other
// joins, and both are reset at the same moment.
package machines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) { story.Main(m) }

const (
	// Budgets are for native speed; the story scales them.
	waitBudget  = 45 * time.Second // to boot and pull the image of etcd, two at the same time
	againBudget = 90 * time.Second // to serve again after a reset of all
	memoryMiB   = 2048             // of a control plane
)

// S-212, S-330, S-331, S-333.
func TestTwoMachines(t *testing.T) {
	story.Built(t, qemu.QEMU)
	var said strings.Builder
	m := story.Marks(t)
	c := story.New(t, "machines", qemu.QEMU, func(o *qemu.Options) {
		o.ControlPlanes, o.MemoryMiB, o.Out, o.Prepare = 2, memoryMiB, &said, waits
	})
	m.Reached("power is on")
	_, steps, _ := strings.Cut(said.String(), "\n") // after the choice, which names this machine
	want := []string{
		"validating CIDR and reserving IPs", "generating PKI and tokens", fmt.Sprintf("creating state directory in %q", c.Dir()),
		"creating network machines", "creating load balancer", "creating dhcpd", "creating control plane nodes", "",
	}
	if diff := cmp.Diff(strings.Join(want, "\n"), steps); diff != "" {
		t.Errorf("what is said (-want +got):\n%s", diff)
	}

	// Both wait, and say for what.
	for _, n := range c.Nodes {
		c.Eventually(waitBudget, n.Name+" waits for bootstrap", func() error {
			return hasSaid(c, n.Name, "Waiting for bootstrap, or for a control plane to join at https://10.5.0.1:6443")
		})
	}
	m.Reached("both wait")
	first, second := c.Nodes[0].Address.String(), c.Nodes[1].Address.String()
	tells := func(part, node string) {
		t.Helper()
		c.Eventually(waitBudget, "bootstrap of "+node, func() error {
			out, err := c.TryGbctl("bootstrap", "-n", node)
			if err != nil {
				out = err.Error()
			}
			if !strings.Contains(out, part) {
				return errors.New(strings.TrimSpace(out))
			}
			return nil
		})
	}
	tells("the cluster begins on this node", first)
	c.Ready(m)
	tells("begun on this node already", first)
	members := c.Gbctl("etcd", "members", "-n", first)
	for _, n := range c.Nodes {
		if !strings.Contains(members, n.Name) {
			t.Errorf("%s is no member:\n%s", n.Name, members)
		}
	}
	// The one that joined has data: it begins no second cluster.
	if out, err := c.TryGbctl("bootstrap", "-n", second); err == nil {
		t.Errorf("bootstrap of %s, which has joined: %s", second, out)
	}

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
	m.Reached("both were reset")
	c.Eventually(againBudget, "the API answers again", func() error {
		_, err := c.Try("get", "--raw", "/readyz")
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), c.Scale(againBudget))
	defer cancel()
	if err := c.WaitReady(ctx, func(s qemu.Milestone) { m.Reached(s.What + " again") }, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, identity(c)); diff != "" {
		t.Errorf("what was there before the reset (-before +after):\n%s", diff)
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

func hasSaid(c *story.Cluster, node, part string) error {
	text, err := os.ReadFile(c.Console(node))
	if err == nil && !strings.Contains(string(text), part) {
		err = fmt.Errorf("it hasn't said %q yet", part)
	}
	return err
}

// identity is the cluster's own and its nodes'.
func identity(c *story.Cluster) string {
	return c.Kubectl("get", "namespace/kube-system", "node/"+c.Nodes[0].Name, "node/"+c.Nodes[1].Name, "-o", "jsonpath={.items[*].metadata.uid}")
}

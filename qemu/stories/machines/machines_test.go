//go:build story && long

// Package machines is the story of two control planes that are virtual machines on one
// network, with disks and addresses from DHCP: both boot, and neither begins a cluster by
// itself.
package machines

import (
	"bytes"
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
	// waitBudget is to boot and pull the image of etcd, two at the same time, at native speed.
	waitBudget = 45 * time.Second
	memoryMiB  = 2048 // of a control plane
)

// S-330, S-331, S-333.
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

//go:build e2e

package e2etest

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/container/snapshot"
)

// NodeProcesses returns the PIDs, on this machine, of all processes of a container node.
func (c *Cluster) NodeProcesses(node string) ([]int, error) { return snapshot.PIDs(c.Cgroup(node)) }

// NodeInit is the PID, on this machine, of a container node's process that runs /sbin/init with an argument:
// "--mode=container" is PID 1.
func (c *Cluster) NodeInit(node, argument string) int {
	c.t.Helper()
	pids, err := c.NodeProcesses(node)
	for _, pid := range pids {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have ended
		if strings.HasPrefix(string(line), "/sbin/init\x00"+argument) {
			return pid
		}
	}
	c.t.Fatalf("no process of %s runs /sbin/init %s: %v", node, argument, err)
	return 0
}

// NodeCPUTime is the processor time that all processes of a container node have used.
func (c *Cluster) NodeCPUTime(node string) (time.Duration, error) {
	return snapshot.CPUTime(c.Cgroup(node))
}

// Holders returns the nodes that have the address on one of their links, also those that are
// frozen or cut off. It works for containers only.
func (c *Cluster) Holders(address netip.Addr) ([]qemu.Node, error) {
	var all []qemu.Node
	for _, n := range c.Nodes {
		has, err := snapshot.HasAddress(c.Cgroup(n.Name), address)
		if err != nil {
			return nil, fmt.Errorf("addresses of %s: %w", n.Name, err)
		}
		if has {
			all = append(all, n)
		}
	}
	return all, nil
}

//go:build e2e

package e2etest

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/container/snapshot"
)

// NodeProcesses returns the PIDs, on this machine, of all processes of a container node.
func (c *Cluster) NodeProcesses(node string) ([]int, error) { return snapshot.PIDs(c.Cgroup(node)) }

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

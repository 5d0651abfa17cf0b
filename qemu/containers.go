package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/qemu/container"
	"github.com/garboard-os/garboard/qemu/container/cgroup"
	"github.com/garboard-os/garboard/qemu/network"
)

// containers runs nodes as containers.
type containers struct {
	plan Plan
	dir  clusterDir
	lan  *network.LAN
}

func newContainers(p Plan, d clusterDir, lan *network.LAN, log *slog.Logger) (containers, error) {
	c := containers{p, d, lan}
	if err := cgroup.Remove(d.cgroup()); err != nil {
		return c, fmt.Errorf("remove what an earlier run left: %w", err)
	}
	if err := container.RaiseInotifyLimit(log); err != nil {
		log.Warn("too many container nodes may fail for want of inotify instances", "error", err)
	}
	return c, nil
}

// cgroup is the parent of the cgroups of all nodes.
func (d clusterDir) cgroup() string { return filepath.Join(cgroup.Parent, d.identity()) }

// identity separates clusters of the same name in different homes.
func (d clusterDir) identity() string {
	sum := sha256.Sum256([]byte(d))
	return filepath.Base(string(d)) + "." + hex.EncodeToString(sum[:4])
}

func (d clusterDir) nodeCgroup(node string) string { return filepath.Join(d.cgroup(), node) }

func (c containers) config(n Node) container.Config {
	return container.Config{
		ID:            c.plan.Name + "." + n.Name,
		Hostname:      n.Name,
		Sandbox:       c.plan.Boot.Sandbox,
		Rootfs:        c.plan.Boot.Rootfs,
		Init:          c.plan.Boot.Init,
		Work:          c.dir.work(n.Name),
		State:         c.dir.state(n.Name),
		Ephemeral:     c.dir.ephemeral(n.Name),
		Configuration: c.dir.config(n.Name),
		Console:       c.dir.console(n.Name),
		Cgroup:        c.dir.nodeCgroup(n.Name),
		CPUs:          n.CPUs,
		MemoryMiB:     n.MemoryMiB,
	}
}

func (c containers) Start(ctx context.Context, n Node) (running, error) {
	config := c.config(n)
	err := config.Prepare()
	if err == nil {
		config.Link, err = c.lan.Veth(n.onLAN())
	}
	if err != nil {
		return nil, err
	}
	r, err := container.Start(ctx, c.lan.Thread(), config)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", n.Name, err)
	}
	return r, nil
}

func (c containers) Close() error { return cgroup.Remove(c.dir.cgroup()) }

// NodeProcesses returns the PIDs, on this machine, of all processes of a container node.
func (c *Cluster) NodeProcesses(node string) ([]int, error) {
	return cgroup.Processes(c.dir.nodeCgroup(node))
}

// NodeCPUTime is the processor time that all processes of a container node have used.
func (c *Cluster) NodeCPUTime(node string) (time.Duration, error) {
	return cgroup.CPUTime(c.dir.nodeCgroup(node))
}

// Holders returns the nodes that have the address on one of their links, also those that are
// frozen or cut off. It works for containers only.
func (c *Cluster) Holders(address netip.Addr) ([]Node, error) {
	var all []Node
	for _, n := range c.Nodes {
		has, err := container.HasAddress(c.dir.nodeCgroup(n.Name), address)
		if err != nil {
			return nil, fmt.Errorf("addresses of %s: %w", n.Name, err)
		}
		if has {
			all = append(all, n)
		}
	}
	return all, nil
}

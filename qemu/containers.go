package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"path/filepath"

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

// Cgroup returns the cgroup of a container node.
func (c *Cluster) Cgroup(node string) string { return c.dir.nodeCgroup(node) }

package qemu

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Holders are the nodes that have the address on one of their links. It asks this
// machine's kernel, and not the nodes: so it is true also of those that are frozen or
// cut off, but only containers can be asked. A node that is off has none.
func (c *Cluster) Holders(address netip.Addr) ([]Node, error) {
	var all []Node
	for _, n := range c.Nodes {
		pid, err := c.initOf(n.Name)
		if err != nil {
			return nil, err
		}
		if pid == 0 {
			continue
		}
		has, err := hasAddress(pid, address)
		if err != nil {
			return nil, fmt.Errorf("addresses of %s: %w", n.Name, err)
		}
		if has {
			all = append(all, n)
		}
	}
	return all, nil
}

// hasAddress looks into the network namespace of a process.
func hasAddress(pid int, address netip.Addr) (bool, error) {
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return false, nil // it has ended meanwhile
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return false, err
	}
	defer h.Close()
	found, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(found, func(a netlink.Addr) bool { return a.IP.Equal(address.AsSlice()) }), nil
}

// initOf is the process of a container node that is PID 1 there; 0: it is off.
func (c *Cluster) initOf(node string) (int, error) {
	pids, err := c.NodeProcesses(node)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // gone meanwhile, if it can't be read
		if strings.HasPrefix(string(line), "/sbin/init\x00--mode=container") {
			return pid, nil
		}
	}
	return 0, nil
}

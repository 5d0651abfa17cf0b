package qemu

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Holders are the nodes that have the address on one of their links. It asks this
// machine's kernel, and not the nodes: so it is true also of those that are frozen or
// cut off, but only containers can be asked. A node that is off has none.
func (c *Cluster) Holders(address netip.Addr) ([]Node, error) {
	inits, err := c.inits()
	if err != nil {
		return nil, err
	}
	var all []Node
	for _, n := range c.Nodes {
		if pid, on := inits[n.Name]; on {
			has, err := hasAddress(pid, address)
			if err != nil {
				return nil, fmt.Errorf("addresses of %s: %w", n.Name, err)
			}
			if has {
				all = append(all, n)
			}
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

// inits are the processes of container nodes that are PID 1 there, by node.
func (c *Cluster) inits() (map[string]int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	all := map[string]int{}
	for _, dir := range dirs {
		line, _ := os.ReadFile(dir + "/cmdline") // gone meanwhile, if it can't be read
		if !strings.HasPrefix(string(line), "/sbin/init\x00--mode=container") {
			continue
		}
		in, _ := os.ReadFile(dir + "/cgroup")
		_, path, ours := strings.Cut(string(in), "/garboard/"+c.Name+"/")
		if !ours {
			continue
		}
		node := strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\n' })[0]
		if all[node], err = strconv.Atoi(filepath.Base(dir)); err != nil {
			return nil, err
		}
	}
	return all, nil
}

package container

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/qemu/container/cgroup"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// HasAddress reports whether the node in this cgroup has the address on one of its links. It
// reads this machine's kernel and does not ask the node. So it works also for a node that is
// frozen or cut off. A node that is off has no address.
func HasAddress(group string, address netip.Addr) (bool, error) {
	pid, err := initOf(group)
	if pid == 0 || err != nil {
		return false, err
	}
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

// initOf is the process that is PID 1 of the node in this cgroup; 0: the node is off.
func initOf(group string) (int, error) {
	pids, err := cgroup.Processes(group)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // fails where it has ended meanwhile
		if strings.HasPrefix(string(line), initPath+"\x00--mode=container") {
			return pid, nil
		}
	}
	return 0, nil
}

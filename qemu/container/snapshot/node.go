package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu/container/cgroup"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// PIDs are those of all processes in a cgroup and below it.
func PIDs(path string) (all []int, err error) {
	dir, _, err := cgroup.In("memory", path)
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a container ended meanwhile
		}
		if err != nil || entry.Name() != "cgroup.procs" {
			return err
		}
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		for _, field := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			all = append(all, pid)
		}
		return err
	})
	return all, err
}

// CPUTime is the processor time that all processes in a cgroup and below it have used, also
// those that have ended. The cgroup's files are cpuacct.usage in nanoseconds (v1) and cpu.stat,
// with microseconds (v2; Documentation/admin-guide/cgroup-v2.rst).
func CPUTime(path string) (time.Duration, error) {
	dir, unified, err := cgroup.In("cpuacct", path)
	if err != nil {
		return 0, err
	}
	name, unit := "cpuacct.usage", time.Nanosecond
	if unified {
		name, unit = "cpu.stat", time.Microsecond
	}
	var n time.Duration
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err == nil {
		_, err = fmt.Sscan(strings.TrimPrefix(string(text), "usage_usec "), &n)
	}
	return n * unit, err
}

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
	pids, err := PIDs(group)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // fails where it has ended meanwhile
		if strings.HasPrefix(string(line), "/sbin/init\x00--mode=container") {
			return pid, nil
		}
	}
	return 0, nil
}

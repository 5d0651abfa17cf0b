package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
)

// setting is a row of the table of kernel settings (sysctl).
type setting boot.Setting

// settings are the kernel parameters that Kubernetes needs; boot.KubeletParameters and
// boot.HardeningParameters are set with them. Those below net/ belong to a network namespace,
// so a container sets its own; all others belong to the machine. (br_netfilter has
// bridge-nf-call-iptables set to 1 from the start: udevd only has to load it.)
var settings = []setting{
	{"net/ipv4/ip_forward", "1", "pods send through the node"},
	{"net/ipv4/conf/all/rp_filter", "0", "answers may take another way than requests, with overlays and several links"},
	{"net/ipv4/conf/default/rp_filter", "0", "the same, for links to come"},
	{"net/ipv6/conf/all/forwarding", "1", "pods send through the node"},
	{"net/ipv4/ping_group_range", "0 2147483647", "ping from pods without privileges"},
	{"net/ipv4/ip_local_reserved_ports", ownPorts, "a connection from one of them would keep its server from listening for as long as it lasts"},
	{"net/core/somaxconn", "32768", "servers in pods with many clients"},
	{"net/ipv4/neigh/default/gc_thresh1", "1024", "a cluster has more neighbours than a home network"},
	{"net/ipv4/neigh/default/gc_thresh2", "4096", "the same"},
	{"net/ipv4/neigh/default/gc_thresh3", "8192", "the same"},
	{"vm/max_map_count", "262144", "databases and search engines map many files"},
	{"kernel/modprobe", self, "there is no modprobe but this program: see help"},
	{"kernel/poweroff_cmd", self + " " + askPowerOff, "hypervisors and hot processors power off through a program"},
	{"kernel/pid_max", "4194304", "the most there can be: pods have their own limits"},
	{"fs/inotify/max_user_instances", "8192", "each container runtime, log collector and kubelet has some, all as root"},
	{"fs/inotify/max_user_watches", "524288", "the same"},
	{"fs/file-max", "9223372036854775807", "limits come from rlimits and cgroups"},
	{"user/max_user_namespaces", "15000", "pods with user namespaces"},
}

// ownPorts are the ports of the node's servers: etcd, the API server, the balancer, the pod
// network, the kubelet and other programs of Kubernetes, node ports of services, apid and
// trustd. The last two are in the range from which the kernel gives ports to connections
// (ip_local_port_range in ip(7)); if a user widens that range, all of them are.
const ownPorts = "2379-2381,6443,7445,8472,10248-10259,30000-32767,50000-50001"

// applySettings writes the table's rows below dir (/proc/sys). A kernel may
// lack one; skipped is called for each that couldn't be set.
func applySettings(dir string, table []setting, skipped func(setting, error)) {
	for _, s := range table {
		if err := os.WriteFile(filepath.Join(dir, s.Name), []byte(s.Value+"\n"), 0); err != nil {
			skipped(s, err)
		}
	}
}

// settingsFor leaves only those of the network namespace for a container.
func settingsFor(mode boot.Mode) []setting {
	all := slices.Clone(settings)
	for _, s := range slices.Concat(boot.KubeletParameters, boot.HardeningParameters) {
		all = append(all, setting(s))
	}
	return slices.DeleteFunc(all, func(s setting) bool {
		return mode == boot.Container && !strings.HasPrefix(s.Name, "net/")
	})
}

// openFiles is the number of files that containers may open. Programs that need many expect
// to be able to raise their own limit to this, and the kernel's fs.nr_open allows it.
const openFiles = 1 << 20

// raiseLimits sets the resource limits that all processes inherit. If the hard
// limit can't be raised (a container without CAP_SYS_RESOURCE) it stays.
func raiseLimits() error {
	for _, limit := range []struct {
		resource int
		name     string
		value    uint64
	}{
		{unix.RLIMIT_NOFILE, "open files", openFiles},
		{unix.RLIMIT_MEMLOCK, "locked memory", unix.RLIM_INFINITY},
		{unix.RLIMIT_NPROC, "processes", unix.RLIM_INFINITY},
	} {
		var now syscall.Rlimit
		if err := syscall.Getrlimit(limit.resource, &now); err != nil {
			return fmt.Errorf("read limit of %s: %w", limit.name, err)
		}
		want := syscall.Rlimit{Cur: limit.value, Max: max(now.Max, limit.value)}
		// Package syscall's Setrlimit: otherwise children would get the limit from
		// before the start of the Go runtime.
		err := syscall.Setrlimit(limit.resource, &want)
		if errors.Is(err, unix.EPERM) {
			err = syscall.Setrlimit(limit.resource, &syscall.Rlimit{Cur: min(now.Max, limit.value), Max: now.Max})
		}
		if err != nil {
			return fmt.Errorf("set limit of %s: %w", limit.name, err)
		}
	}
	return nil
}

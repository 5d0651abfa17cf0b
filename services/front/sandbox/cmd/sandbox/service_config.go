package main

import (
	_ "embed"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// serviceMountTable is what a service finds mounted besides its root and its
// binds. There is no /sys.
var serviceMountTable = []*configs.Mount{
	// With hidepid=2 (proc(5)) even of what is in its PID namespace it sees only what
	// is its own. (subset=pid would hide the rest of /proc, too, but libcontainer
	// reads /proc/sys there.)
	{Device: "proc", Source: "proc", Destination: "/proc", Flags: quiet, Data: "hidepid=2"},
	{Device: "tmpfs", Source: "tmpfs", Destination: "/dev", Flags: unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_RDONLY, Data: "mode=0755,size=64k"},
	// Its pages count for the service's ceiling of memory.
	{Device: "tmpfs", Source: "tmpfs", Destination: "/tmp", Flags: quiet, Data: "mode=1777,size=8m,nr_inodes=1k"},
}

// serviceMasked are the parts of /proc with facts about the machine, or that change it.
// They are empty in the sandbox. Those that the kernel lacks are left out.
var serviceMasked = strings.Fields(serviceMaskedPaths)

//go:embed masked.txt
var serviceMaskedPaths string

// serviceDevices are all that a service has.
var serviceDevices = []*devices.Device{
	charDevice("/dev/null", 1, 3, 0o666),
	charDevice("/dev/urandom", 1, 9, 0o666),
}

// rootInside is the first of the host's user IDs for root in a service's user
// namespace, one for each service: libcontainer is that root while it mounts
// things. They own nothing anywhere, and lie below those of pods.
const rootInside = 60000

// serviceConfig is the whole sandbox for libcontainer.
func serviceConfig(s serviceSpec, root string, userNamespace bool) *configs.Config {
	c := &configs.Config{
		Rootfs:     root,
		Readonlyfs: true,
		// The network is the node's: the service listens there, and on a port that
		// needs no privilege.
		Namespaces: configs.Namespaces{
			{Type: configs.NEWNS}, {Type: configs.NEWPID}, {Type: configs.NEWIPC}, {Type: configs.NEWUTS}, {Type: configs.NEWCGROUP},
		},
		MaskPaths:       serviceMasked,
		ReadonlyPaths:   []string{"/proc/sys"},
		Mounts:          append([]*configs.Mount{}, serviceMountTable...),
		Devices:         serviceDevices,
		Capabilities:    &configs.Capabilities{}, // none, in no set
		NoNewPrivileges: true,
		Seccomp:         serviceFilter,
		OomScoreAdj:     oomScore(s.OOMScoreAdj),
		// Its memory has keys, and a core file has no reader.
		Rlimits: []configs.Rlimit{{Type: unix.RLIMIT_CORE}},
		Cgroups: &cgroups.Cgroup{Path: s.Cgroup, Resources: serviceResources(s)},
	}
	for path, flags := range map[string]int{s.Dir: quiet, s.Args[0]: quiet &^ unix.MS_NOEXEC} {
		c.Mounts = append(c.Mounts, &configs.Mount{Device: "bind", Source: path, Destination: path, Flags: unix.MS_BIND | unix.MS_RDONLY | flags})
	}
	if userNamespace {
		c.Namespaces = append(c.Namespaces, configs.Namespace{Type: configs.NEWUSER})
		// The service's own ID stays what it is, for the files that are its.
		mapping := []configs.IDMap{
			{ContainerID: 0, HostID: int64(rootInside + s.UID), Size: 1},
			{ContainerID: int64(s.UID), HostID: int64(s.UID), Size: 1},
		}
		c.UIDMappings, c.GIDMappings = mapping, mapping
	}
	return c
}

func serviceResources(s serviceSpec) *cgroups.Resources {
	r := &cgroups.Resources{Memory: s.MemoryMax, PidsLimit: &s.TasksMax}
	if cgroups.IsCgroup2UnifiedMode() {
		// No swap: keys don't go to a disk. (cgroup v1 has it in one sum with memory,
		// and kernels may lack that; only development hosts have v1.)
		r.MemorySwap = s.MemoryMax
	}
	for _, d := range serviceDevices {
		r.Devices = append(r.Devices, &d.Rule)
	}
	return r
}

// oomScore is the wanted adjustment, or our own where the kernel lets us lower
// none (a container without CAP_SYS_RESOURCE).
func oomScore(want int) *int {
	if want >= 0 {
		return &want
	}
	own, err := capability.NewPid2(0)
	if err != nil || own.Load() != nil || !own.Get(capability.EFFECTIVE, capability.CAP_SYS_RESOURCE) {
		return nil
	}
	return &want
}

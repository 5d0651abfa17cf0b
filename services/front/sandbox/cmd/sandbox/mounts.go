package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"golang.org/x/sys/unix"
)

const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// nodeMounts is what a node finds mounted besides its root. It is what stage 1
// and the mount table of PID 1 give to a real machine.
var nodeMounts = []*configs.Mount{
	{Device: "proc", Source: "proc", Destination: "/proc", Flags: quiet},
	// Read-only: most of it is the host's hardware.
	{Device: "sysfs", Source: "sysfs", Destination: "/sys", Flags: quiet | unix.MS_RDONLY},
	// The node's own subtree, by the cgroup namespace; writable, as the kubelet
	// and containerd make cgroups. v1 or v2, as the host has it.
	{Device: "cgroup", Source: "cgroup", Destination: "/sys/fs/cgroup", Flags: quiet},
	{Device: "tmpfs", Source: "tmpfs", Destination: "/dev", Flags: unix.MS_NOSUID | unix.MS_STRICTATIME, Data: "mode=755"},
	{Device: "devpts", Source: "devpts", Destination: "/dev/pts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Data: "newinstance,ptmxmode=0666,mode=0620,gid=5"},
	{Device: "tmpfs", Source: "shm", Destination: "/dev/shm", Flags: unix.MS_NOSUID | unix.MS_NODEV, Data: "mode=1777"},
	{Device: "mqueue", Source: "mqueue", Destination: "/dev/mqueue", Flags: quiet},
	{Device: "tmpfs", Source: "tmpfs", Destination: "/run", Flags: unix.MS_NOSUID | unix.MS_NODEV, Data: "mode=755"},
	{Device: "tmpfs", Source: "tmpfs", Destination: "/tmp", Flags: unix.MS_NOSUID | unix.MS_NODEV, Data: "mode=1777"},
}

// extraDevices are made besides the common ones (null, zero, full, random,
// urandom, tty, ptmx) where the host has them.
var extraDevices = []*devices.Device{
	// The kubelet watches it for processes that the kernel killed. It is the
	// host's: a node that writes to it is seen in the host's log.
	charDevice("/dev/kmsg", 1, 11, 0o600),
	charDevice("/dev/fuse", 10, 229, 0o666),
	charDevice("/dev/net/tun", 10, 200, 0o666),
}

func charDevice(path string, major, minor int64, mode os.FileMode) *devices.Device {
	return &devices.Device{
		Rule:     devices.Rule{Type: devices.CharDevice, Major: major, Minor: minor, Permissions: "rwm", Allow: true},
		Path:     path,
		FileMode: mode,
	}
}

func nodeDevices() (all []*devices.Device) {
	for _, d := range append(specconv.AllowedDevices[:len(specconv.AllowedDevices):len(specconv.AllowedDevices)], extraDevices...) {
		// Some of the common ones are wildcards for device rules, without a node.
		if d.Path == "" || d.Minor < 0 {
			continue
		}
		if _, err := os.Stat(d.Path); err == nil {
			all = append(all, d)
		}
	}
	return all
}

// nodeConfig is the whole node for libcontainer.
func nodeConfig(s nodeSpec, root string) (*configs.Config, error) {
	capabilities, err := nodeCapabilities()
	if err != nil {
		return nil, err
	}
	c := &configs.Config{
		Rootfs:     root,
		Readonlyfs: true,
		Hostname:   s.Hostname,
		Namespaces: configs.Namespaces{
			{Type: configs.NEWNS}, {Type: configs.NEWPID}, {Type: configs.NEWIPC},
			{Type: configs.NEWUTS}, {Type: configs.NEWNET}, {Type: configs.NEWCGROUP},
		},
		// The kubelet's volumes and the containers' root filesystems are seen by
		// each other only through shared mounts.
		RootPropagation: unix.MS_SHARED | unix.MS_REC,
		Mounts:          nodeMounts,
		Devices:         nodeDevices(),
		Capabilities:    capabilities,
		Cgroups: &cgroups.Cgroup{
			Path: s.Cgroup,
			// A privileged pod is allowed all devices, which its parent must be, too.
			Resources: &cgroups.Resources{Devices: []*devices.Rule{{
				Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: true,
			}}},
		},
		Hooks:         shieldHook(root),
		ReadonlyPaths: readonlyPaths,
		MaskPaths:     maskedPaths,
	}
	for _, b := range s.Binds {
		m := &configs.Mount{Device: "bind", Source: b.Source, Destination: b.Target, Flags: unix.MS_BIND | unix.MS_REC}
		if b.ReadOnly {
			m.Flags |= unix.MS_RDONLY
		}
		c.Mounts = append(c.Mounts, m)
	}
	if s.NetDevice != "" {
		c.NetDevices = map[string]*configs.LinuxNetDevice{s.NetDevice: {Name: "eth0"}}
	}
	return c, nil
}

// withheld are the capabilities that reach past every namespace, for which a node
// has no honest use: the clock and the kernel are the host's.
var withheld = map[capability.Cap]bool{
	capability.CAP_SYS_TIME:   true,
	capability.CAP_SYS_MODULE: true,
}

// nodeCapabilities is all that we have ourselves (a virtual machine's root may
// lack some), without the withheld ones.
func nodeCapabilities() (*configs.Capabilities, error) {
	own, err := capability.NewPid2(0)
	if err != nil {
		return nil, fmt.Errorf("own capabilities: %w", err)
	}
	if err := own.Load(); err != nil {
		return nil, fmt.Errorf("own capabilities: %w", err)
	}
	supported, err := capability.ListSupported()
	if err != nil {
		return nil, fmt.Errorf("capabilities of the kernel: %w", err)
	}
	var names []string
	for _, c := range supported {
		if own.Get(capability.EFFECTIVE, c) && own.Get(capability.BOUNDING, c) && !withheld[c] {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	return &configs.Capabilities{Bounding: names, Effective: names, Permitted: names}, nil
}

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
)

const (
	noSuidDevExec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	cgroupRoot    = "/sys/fs/cgroup"

	// The writable part of /etc: on /run, so it is lost at power off.
	etcUpper = "/run/etc/upper"
	etcWork  = "/run/etc/work"
)

// mountPoint is a row of a mount table. A mount that exists already stays: it
// was made by stage 1 or by the creator of the container.
type mountPoint struct {
	target string
	fstype string
	flags  uintptr
	data   string
	// make are directories that must exist first, on a writable file system.
	make []string
	// without is why a node works without this mount if it isn't possible.
	without string
	// machine marks rows that a container gets from its host, or doesn't need.
	machine bool
}

// earlyMounts are those that stage 1 needs. Stage 2 keeps them.
var earlyMounts = []mountPoint{
	{target: "/proc", fstype: "proc", flags: noSuidDevExec},
	{target: "/sys", fstype: "sysfs", flags: noSuidDevExec},
	{target: "/dev", fstype: "devtmpfs", flags: unix.MS_NOSUID, data: "mode=0755"},
	{target: "/run", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=0755"},
}

// mounts are all that a node needs before its first service; disks come later.
var mounts = append(slices.Clone(earlyMounts), []mountPoint{
	{target: "/dev/pts", fstype: "devpts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, data: "mode=0620,ptmxmode=0666,gid=5", make: []string{"/dev/pts"}},
	{target: "/dev/shm", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777", make: []string{"/dev/shm"}},
	{target: "/dev/mqueue", fstype: "mqueue", flags: noSuidDevExec, make: []string{"/dev/mqueue"}, without: "only programs with POSIX message queues miss it"},
	{target: "/dev/hugepages", fstype: "hugetlbfs", flags: unix.MS_NOSUID | unix.MS_NODEV, make: []string{"/dev/hugepages"}, machine: true, without: "only pods with huge pages miss it"},
	{target: "/tmp", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
	// Keys and certificates, never on a disk. 64 MiB is a thousand times their size.
	{target: boot.SecretsDir, fstype: "tmpfs", flags: noSuidDevExec, data: "mode=0700,size=64m"},
	// What PID 1 tells the programs in its sandboxes. Pods don't see it (package containerd).
	{target: boot.PrivateDir, fstype: "tmpfs", flags: noSuidDevExec, data: "mode=0755,size=64m"},
	{target: "/etc", fstype: "overlay", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "lowerdir=/etc,upperdir=" + etcUpper + ",workdir=" + etcWork, make: []string{"/run/etc", etcUpper, etcWork}},
	{target: cgroupRoot, fstype: "cgroup2", flags: noSuidDevExec, data: "nsdelegate,memory_recursiveprot", machine: true},
	{target: "/sys/fs/bpf", fstype: "bpf", flags: noSuidDevExec, data: "mode=0700", machine: true, without: "only CNIs that pin eBPF programs miss it"},
	{target: "/sys/kernel/security", fstype: "securityfs", flags: noSuidDevExec, machine: true, without: "the kernel may be built without security modules"},
	{target: "/sys/kernel/tracing", fstype: "tracefs", flags: noSuidDevExec, machine: true, without: "only tracing tools miss it"},
	{target: "/sys/firmware/efi/efivars", fstype: "efivarfs", flags: noSuidDevExec, machine: true, without: "the firmware may be a BIOS"},
	{target: boot.PstoreDir, fstype: "pstore", flags: noSuidDevExec, machine: true, without: "only the last words of a kernel that died are lost"},
}...)

// mountAll mounts the rows of a table in order. skipped is called for those
// that a node can do without.
func mountAll(table []mountPoint, skipped func(mountPoint, error)) error {
	there, err := mountedAt()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, m := range table {
		if slices.Contains(there, m.target) {
			continue
		}
		switch err := m.mount(); {
		case err != nil && m.without != "":
			skipped(m, err)
		case err != nil:
			return err
		}
	}
	return nil
}

func (m mountPoint) mount() error {
	for _, dir := range m.make {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := unix.Mount(m.fstype, m.target, m.fstype, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s with %q: %w", m.fstype, m.target, m.data, err)
	}
	return nil
}

// forMode leaves out the rows that don't apply to a mode.
func forMode(table []mountPoint, mode boot.Mode) []mountPoint {
	return slices.DeleteFunc(slices.Clone(table), func(m mountPoint) bool {
		return m.machine && mode == boot.Container
	})
}

// shareMounts makes all mounts shared: a volume that the kubelet mounts must be
// visible in containers that run already (bidirectional propagation), and the
// kernel's default is private (mount_namespaces(7)).
func shareMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	return nil
}

// devLinks are names in /dev that programs use and devtmpfs doesn't have.
var devLinks = map[string]string{
	"/dev/fd":     "/proc/self/fd",
	"/dev/stdin":  "/proc/self/fd/0",
	"/dev/stdout": "/proc/self/fd/1",
	"/dev/stderr": "/proc/self/fd/2",
}

func linkDevices() error {
	for _, dir := range []string{"/run/cdi", "/run/udev"} { // pods mount them, and /var/run leads to them
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for name, target := range devLinks {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// mountedAt lists all mount points, in the order of mounting.
func mountedAt() ([]string, error) {
	mounts, err := mountinfo.GetMounts(nil)
	return lists.Of(mounts, func(m *mountinfo.Info) string { return m.Mountpoint }), err
}

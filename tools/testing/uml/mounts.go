package uml

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// A mounted is one mount of the guest. The kernel itself has mounted the root and /dev, and
// init /proc.
type mounted struct {
	from, to, kind, data string
	flags                uintptr
}

// mounts makes the guest's mounts, in their order.
func mounts(a assignment) error {
	all := []mounted{
		{from: "sysfs", to: "/sys", kind: "sysfs"},
		{from: "cgroup2", to: "/sys/fs/cgroup", kind: "cgroup2"},
		{from: "devpts", to: "/dev/pts", kind: "devpts", data: "ptmxmode=0666,mode=0620"},
	}
	for _, dir := range a.Temporary {
		all = append(all, mounted{from: "tmpfs", to: dir, kind: "tmpfs", data: "mode=1777"})
	}
	for _, s := range a.Shared {
		m := mounted{from: "host", to: s.Path, kind: "hostfs", data: s.Path}
		if !s.Writable {
			m.flags = unix.MS_RDONLY
		}
		all = append(all, m)
	}
	for _, m := range all {
		// A directory of the read-only root is there, or the mount says that it isn't.
		if err := os.MkdirAll(m.to, 0o755); err != nil && !errors.Is(err, unix.EROFS) && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := unix.Mount(m.from, m.to, m.kind, m.flags, m.data); err != nil {
			return &os.PathError{Op: "mount " + m.kind, Path: m.to, Err: err}
		}
	}
	// As udev makes them; programs find what they have open by these names.
	for name, to := range map[string]string{"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"} {
		if err := os.Symlink(to, name); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

package api

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/boot/untrusted"
	"golang.org/x/sys/unix"
)

// pseudoFilesystems make up what is read, by their magic numbers (statfs(2)).
var pseudoFilesystems = []int64{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
	unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.EFIVARFS_MAGIC, unix.DEVPTS_SUPER_MAGIC,
}

// isPseudo reports whether the kernel makes the content of f.
func isPseudo(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && slices.Contains(pseudoFilesystems, int64(st.Type))
}

// regular is a file that has content, and no side effects.
type regular struct {
	*os.File
	info   fs.FileInfo
	pseudo bool
}

// openRegular opens a file to be read. Opening a device may do something, so that
// it is one is seen before, and once more after.
func openRegular(path string) (*regular, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fileError(err)
	}
	if err := readableKind(path, info); err != nil {
		return nil, err
	}
	f, err := untrusted.OpenNamed(path, 0)
	if err != nil {
		return nil, fileError(err)
	}
	info, err = f.Stat()
	if err == nil {
		err = readableKind(path, info)
	} else {
		err = fileError(err)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return &regular{f, info, isPseudo(f)}, nil
}

func readableKind(path string, info fs.FileInfo) error {
	switch {
	case info.IsDir():
		return failed(connect.CodeInvalidArgument, "%s is a directory: list it (gbctl ls), or copy it (gbctl copy)", readable(path))
	case !info.Mode().IsRegular():
		return failed(connect.CodeInvalidArgument, "%s isn't a file with content: %s", readable(path), lsMode(info.Mode()))
	}
	return nil
}

// Read implements io.Reader. What there is nothing of now (the kernel's log, read
// to its end) has ended.
func (r *regular) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(r.Fd()), p)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN), err == nil && n == 0:
			return 0, io.EOF
		case err != nil:
			return 0, &fs.PathError{Op: "read", Path: r.Name(), Err: err}
		}
		return n, nil
	}
}

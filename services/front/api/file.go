package api

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// fileChunk is a message of a stream: it is in memory as often as there are
	// streams.
	fileChunk = 32 << 10
	// maxDepth of a listing. No tree of a node is deeper.
	maxDepth = 64
	// maxPseudo bounds a file that the kernel makes up as it is read: some have no
	// end, and /proc/kcore is all of the memory.
	maxPseudo = 64 << 20
)

// fileService reads files of the node.
type fileService struct {
	root string // what paths are below; tests have their own
}

// at is where a path of a request is.
func (s *fileService) at(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", failed(connect.CodeInvalidArgument, "path %q isn't absolute: it must begin with /", readable(path))
	}
	return filepath.Join(s.root, filepath.Clean(path)), nil
}

// fileError has the code on which a client decides.
func fileError(err error) error {
	text := errors.New(readable(err.Error()))
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return connect.NewError(connect.CodeNotFound, text)
	case errors.Is(err, fs.ErrPermission):
		return connect.NewError(connect.CodePermissionDenied, text)
	}
	return connect.NewError(connect.CodeInternal, text)
}

func (s *fileService) List(ctx context.Context, req *connect.Request[apiv1.ListFilesRequest], stream *connect.ServerStream[apiv1.FileInfo]) error {
	path, err := s.at(req.Msg.GetPath())
	if err != nil {
		return err
	}
	depth := int(min(max(req.Msg.GetDepth(), 1), maxDepth))
	top, err := os.Lstat(path)
	if err != nil {
		return fileError(err)
	}
	self := describeFile(path, ".", top, nil)
	if top.Mode()&fs.ModeSymlink != 0 {
		// What a person names is meant to be followed, as ls does.
		if to, err := filepath.EvalSymlinks(path); err == nil {
			path = to
			if info, err := os.Lstat(to); err == nil {
				top = info
			}
		}
	}
	if err := stream.Send(self); err != nil {
		return err
	}
	if !top.IsDir() {
		return nil
	}
	return list(ctx, path, "", depth, stream.Send)
}

// list sends what is in dir, which is called name, and in the directories below as
// far as depth goes.
func list(ctx context.Context, dir, name string, depth int, send func(*apiv1.FileInfo) error) error {
	entries, err := untrusted.ReadNamed(dir)
	if err != nil {
		if err := send(describeFile(dir, cmp.Or(name, "."), nil, err)); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		below, path := filepath.Join(name, e.Name()), filepath.Join(dir, e.Name())
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err := send(describeFile(path, below, info, err)); err != nil {
			return err
		}
		if err == nil && info.IsDir() && depth > 1 {
			if err := list(ctx, path, below, depth-1, send); err != nil {
				return err
			}
		}
	}
	return nil
}

// describeFile has the error in the place of a file that can't be looked at.
func describeFile(path, name string, info fs.FileInfo, err error) *apiv1.FileInfo {
	if err != nil {
		return &apiv1.FileInfo{Name: readable(name), Error: readable(err.Error())}
	}
	f := &apiv1.FileInfo{Name: readable(name), Size: uint64(max(info.Size(), 0)), Mode: lsMode(info.Mode()), Modified: timestamppb.New(info.ModTime())}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Uid, f.Gid = st.Uid, st.Gid
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		to, err := os.Readlink(path)
		if err != nil {
			f.Error = readable(err.Error())
		}
		f.Link = readable(to)
	}
	return f
}

// lsMode is a mode in the ten characters of ls(1).
func lsMode(m fs.FileMode) string {
	out := []byte(m.Perm().String())
	for _, kind := range []struct {
		bit  fs.FileMode
		char byte
	}{{fs.ModeDir, 'd'}, {fs.ModeSymlink, 'l'}, {fs.ModeDevice, 'b'}, {fs.ModeCharDevice, 'c'}, {fs.ModeNamedPipe, 'p'}, {fs.ModeSocket, 's'}} {
		if m&kind.bit != 0 {
			out[0] = kind.char // a character device has both bits
		}
	}
	for _, special := range []struct {
		bit           fs.FileMode
		at            int
		with, without byte
	}{{fs.ModeSetuid, 3, 's', 'S'}, {fs.ModeSetgid, 6, 's', 'S'}, {fs.ModeSticky, 9, 't', 'T'}} {
		if m&special.bit != 0 {
			out[special.at] = map[bool]byte{true: special.with, false: special.without}[out[special.at] == 'x']
		}
	}
	return string(out)
}

func (s *fileService) Read(ctx context.Context, req *connect.Request[apiv1.ReadFileRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	path, err := s.at(req.Msg.GetPath())
	if err != nil {
		return err
	}
	f, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	most := int64(math.MaxInt64)
	if f.pseudo {
		most = maxPseudo
	}
	out := bufio.NewWriterSize(chunks{stream}, fileChunk)
	n, err := io.CopyN(out, sleep.Reader(ctx, f), most)
	sent := out.Flush()
	switch {
	case errors.As(err, new(*fs.PathError)):
		return fileError(err)
	case err != nil && !errors.Is(err, io.EOF):
		return err
	case sent == nil && n >= most:
		return failed(connect.CodeResourceExhausted, "the kernel makes this file up as it is read, and it has more than %d MiB: that was the beginning", most>>20)
	}
	return sent
}

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

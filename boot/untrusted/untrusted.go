// Package untrusted is the one way of PID 1 to files that others can write: all below /var, the
// directories that pods have in /run and /etc, and their volumes. A pod with a hostPath may
// have put a link, a FIFO, a device or a file without end in the place of a file, and may do
// so at any moment.
//
// So a path with a symbolic link in any of its parts is refused, and so is what isn't a
// regular file or a directory, before it is opened. Nothing here waits, and what is read is
// bounded. Changes are made below the descriptor of a directory that was reached in this way.
package untrusted

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

// maxEntries bounds what of a directory is read.
const maxEntries = 10_000

// harmless are the flags of every open: no wait for the writer of a FIFO, no terminal.
const harmless = unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY

// resolve opens path without following a link (openat2(2), Linux 5.6).
func resolve(path string, flags int, perm fs.FileMode) (*os.File, error) {
	path = filepath.Clean(path)
	how := unix.OpenHow{Flags: uint64(harmless | flags), Mode: uint64(perm.Perm()), Resolve: unix.RESOLVE_NO_SYMLINKS}
	if flags&unix.O_PATH != 0 {
		how.Flags = uint64(unix.O_CLOEXEC | flags) // it takes no others
	}
	for {
		fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ELOOP):
			return nil, &fs.PathError{Op: "open", Path: path, Err: errors.New("a link is in its place or on the way to it, and isn't followed")}
		case err != nil:
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		default:
			return os.NewFile(uintptr(fd), path), nil
		}
	}
}

// place opens path only as a place in the file system: whatever is there isn't touched.
func place(path string, flags int) (*os.File, error) { return resolve(path, unix.O_PATH|flags, 0) }

// through is the path of an open file or directory that nobody can replace.
func through(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// Open opens a regular file to read it.
func Open(path string) (*os.File, error) { return OpenFile(path, os.O_RDONLY, 0) }

// OpenLog is Open for a file whose content goes elsewhere: it must have no second name either,
// which could be that of a secret.
func OpenLog(path string) (*os.File, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
			err = fmt.Errorf("%s has another name (a hard link), and isn't read", path)
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// OpenFile opens a regular file. With os.O_CREATE it makes one where nothing is.
func OpenFile(path string, flags int, perm fs.FileMode) (*os.File, error) {
	at, err := place(path, 0)
	if flags&os.O_CREATE != 0 && errors.Is(err, fs.ErrNotExist) {
		return resolve(path, flags|os.O_EXCL, perm)
	}
	if err != nil {
		return nil, err
	}
	defer at.Close()
	info, err := at.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file: %s", path, info.Mode().Type())
	}
	fd, err := unix.Open(through(at), harmless|flags&^(os.O_CREATE|os.O_EXCL), 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenNamed opens what a person has named, of whatever kind, to read it: links are followed.
func OpenNamed(path string, flags int) (*os.File, error) {
	fd, err := unix.Open(path, harmless|flags, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// ReadFile reads a regular file that has at most so many bytes.
func ReadFile(path string, most int) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(data) > most {
		return nil, fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return data, err
}

// ReadLinked is ReadFile for a name that may be a link to a file beside it, as programs
// make that replace a certificate: no other link is followed.
func ReadLinked(path string, most int) ([]byte, error) {
	to, err := Beside(path)
	if err != nil {
		return nil, err
	}
	return ReadFile(to, most)
}

// Beside is the path of the file that a link names in its own directory, or path itself.
func Beside(path string) (string, error) {
	at, err := place(path, unix.O_NOFOLLOW)
	if err != nil {
		return "", err
	}
	defer at.Close()
	if info, err := at.Stat(); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		return path, err
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(at.Fd()), "", buf)
	if err != nil {
		return "", &fs.PathError{Op: "readlink", Path: path, Err: err}
	}
	to := string(buf[:n])
	if base := filepath.Base(to); to == base || to == filepath.Join(filepath.Dir(path), base) {
		return filepath.Join(filepath.Dir(path), base), nil
	}
	return "", fmt.Errorf("%s is a link out of its directory, and isn't followed", path)
}

// ReadDir lists a directory, sorted.
func ReadDir(path string) ([]fs.DirEntry, error) {
	return list(resolve(path, unix.O_DIRECTORY, 0))
}

// ReadNamed lists a directory that a person has named: links are followed.
func ReadNamed(path string) ([]fs.DirEntry, error) { return list(OpenNamed(path, unix.O_DIRECTORY)) }

// list has some of the entries also where it has an error.
func list(d *os.File, err error) ([]fs.DirEntry, error) {
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(maxEntries + 1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	if len(entries) > maxEntries {
		return entries[:maxEntries], fmt.Errorf("%s has more than %d entries: the others aren't listed", d.Name(), maxEntries)
	}
	return entries, err
}

// Glob is the paths in one directory whose last part matches; none where there is no directory.
func Glob(dir, pattern string) ([]string, error) {
	entries, err := ReadDir(dir)
	if err != nil {
		return nil, boot.IgnoreMissing(err)
	}
	var paths []string
	for _, e := range entries {
		if fits, err := filepath.Match(pattern, e.Name()); err != nil {
			return nil, err
		} else if fits {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}

// Stat describes what is at path. A link there is described itself.
func Stat(path string) (fs.FileInfo, error) {
	at, err := place(path, unix.O_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	return at.Stat()
}

// Exists reports whether anything is at path.
func Exists(path string) bool {
	_, err := Stat(path)
	return err == nil
}

// below calls do with a path of the last part of path, of which nobody can replace the directory.
func below(path string, do func(path string) error) error {
	dir, err := place(filepath.Dir(filepath.Clean(path)), unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = do(filepath.Join(through(dir), filepath.Base(path)))
	var at *fs.PathError
	if errors.As(err, &at) {
		return &fs.PathError{Op: at.Op, Path: path, Err: at.Err}
	}
	return err
}

// WriteFile is boot.WriteFile: the file is new, so nothing that was in its place is written to.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	return below(path, func(path string) error { return boot.WriteFile(path, data, perm) })
}

// WriteChanged writes a file unless it has this content already, and reports whether it did.
func WriteChanged(path string, data []byte, perm fs.FileMode) (bool, error) {
	if have, err := ReadFile(path, len(data)); err == nil && bytes.Equal(have, data) {
		return false, nil
	}
	return true, WriteFile(path, data, perm)
}

// Mkdir makes a directory, of which the parent exists.
func Mkdir(path string, perm fs.FileMode) error {
	return below(path, func(path string) error { return os.Mkdir(path, perm) })
}

// MkdirAll makes a directory with those above it.
func MkdirAll(path string, perm fs.FileMode) error {
	d, err := place(path, unix.O_DIRECTORY)
	if err == nil {
		return d.Close()
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := MkdirAll(filepath.Dir(filepath.Clean(path)), perm); err != nil {
		return err
	}
	if err := Mkdir(path, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	d, err = place(path, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	return d.Close()
}

// Reclaim is MkdirAll where a pod may have left something else. What isn't a directory there, or on the way, is moved
// aside.
func Reclaim(path string, perm fs.FileMode) error {
	for i, c := range path + "/" {
		at := path[:min(i, len(path))]
		if c != '/' || at == "" {
			continue
		}
		if info, err := Stat(at); err == nil && !info.IsDir() {
			if err := errors.Join(RemoveAll(at+".aside"), Rename(at, at+".aside")); err != nil {
				return err
			}
		}
	}
	return MkdirAll(path, perm)
}

// Chmod changes the mode of a regular file or a directory.
func Chmod(path string, mode fs.FileMode) error {
	at, err := place(path, 0)
	if err != nil {
		return err
	}
	defer at.Close()
	info, err := at.Stat()
	if err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is neither a file nor a directory: %s", path, info.Mode().Type())
	}
	if err != nil {
		return err
	}
	return os.Chmod(through(at), mode)
}

// Give makes a user, and its group, the owner of a file, or of a directory with what is in it, at most so many levels
// deep; -1 changes nothing. What is neither a file nor a directory is refused. So is what belongs to the user of
// another program, and a file with a second name, which could be that of another program's secret.
func Give(path string, uid, levels int) error {
	at, err := place(path, 0)
	if err != nil {
		return err
	}
	defer at.Close()
	info, err := at.Stat()
	if err != nil || uid < 0 {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() && (!info.Mode().IsRegular() || st.Nlink > 1) || int(st.Uid) != uid && boot.OfProgram(int(st.Uid)) {
		return fmt.Errorf("%s can't be given to user %d: it is neither a directory nor a file with one name, or it is of another program", path, uid)
	}
	if info.IsDir() {
		entries, err := ReadDir(path)
		if err != nil {
			return err
		}
		if levels == 1 && slices.ContainsFunc(entries, fs.DirEntry.IsDir) {
			return fmt.Errorf("%s can't be given to user %d: it has directories in it", path, uid)
		}
		for _, e := range entries {
			if err := Give(filepath.Join(path, e.Name()), uid, levels-1); err != nil {
				return err
			}
		}
	}
	if int(st.Uid) == uid && int(st.Gid) == uid {
		return nil
	}
	return os.Chown(through(at), uid, uid)
}

// Remove removes a file, a link or an empty directory.
func Remove(path string) error { return below(path, os.Remove) }

// RemoveAll removes a tree. Links in it are removed, not followed.
func RemoveAll(path string) error { return boot.IgnoreMissing(below(path, os.RemoveAll)) }

// Symlink makes a link, where nothing is.
func Symlink(to, path string) error {
	return below(path, func(path string) error { return os.Symlink(to, path) })
}

// Rename moves a file, or a directory, also in the place of an empty one.
func Rename(from, to string) error {
	return below(from, func(from string) error {
		return below(to, func(to string) error {
			if err := unix.Rename(from, to); err != nil { // os.Rename doesn't replace an empty directory
				return &fs.PathError{Op: "rename", Path: to, Err: err}
			}
			return nil
		})
	})
}

// Sync makes a file durable, or what was made and removed in a directory.
func Sync(path string) error {
	f, err := resolve(path, unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.ENOTDIR) {
		f, err = Open(path)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

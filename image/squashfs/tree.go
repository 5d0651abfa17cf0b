package squashfs

import (
	"bytes"
	"io"
	"io/fs"
	"path"
	"strings"
)

// Tree is the content of a filesystem: path without a leading slash → file. Directories above a file come by
// themselves.
type Tree map[string]File

// File is a file, a directory or a symbolic link.
type File struct {
	// Mode has the permission bits, the sticky bit, and fs.ModeDir or fs.ModeSymlink.
	Mode fs.FileMode
	// Target is where a link leads.
	Target string
	Size   int64
	Open   func() (io.ReadCloser, error)
	// packed is where the content lies in the image that it was read from.
	packed *packed
}

// Directory is an empty one.
func Directory(perm fs.FileMode) File { return File{Mode: fs.ModeDir | perm} }

// Link is a symbolic link.
func Link(target string) File { return File{Mode: fs.ModeSymlink | 0o777, Target: target} }

// Content is a file with these bytes.
func Content(data []byte, perm fs.FileMode) File {
	return File{Mode: perm, Size: int64(len(data)), Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

// Remove removes a path and what is below it, and returns the paths. It follows a link above the path.
func (t Tree) Remove(name string) (removed []string) {
	name = t.Resolve(name)
	for at := range t {
		if at == name || name == "" || strings.HasPrefix(at, name+"/") {
			delete(t, at)
			removed = append(removed, at)
		}
	}
	return removed
}

// maxLinks is how many links a path may have (path_resolution(7)).
const maxLinks = 40

// Resolve is where a path leads, with links in the directories above it followed: lib/modules is usr/lib/modules.
func (t Tree) Resolve(name string) string {
	name = clean(name)
	for range maxLinks {
		next, followed := t.follow(name)
		if !followed {
			break
		}
		name = next
	}
	return name
}

func (t Tree) follow(name string) (string, bool) {
	for at := 0; ; {
		slash := strings.IndexByte(name[at:], '/')
		if slash < 0 {
			return name, false
		}
		at += slash
		above := name[:at]
		if f := t[above]; f.Mode&fs.ModeSymlink != 0 {
			target := f.Target
			if !path.IsAbs(target) {
				target = path.Join("/", path.Dir(above), target)
			}
			return clean(target + name[at:]), true
		}
		at++
	}
}

// clean makes a path below the root out of any path.
func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

// ReadFile reads a whole file.
func (t Tree) ReadFile(name string) ([]byte, error) {
	f, ok := t[name]
	if !ok || !f.Mode.IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
	}
	in, err := f.Open()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(in)
}

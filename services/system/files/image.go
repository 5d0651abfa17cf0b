package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// image is the root filesystem as it was built: the files that the overlay of
// /etc hides are under its lower side.
type image struct {
	dir   string
	close func() error
	err   error // why there is none: whatever needs it fails with that
}

// openImage clones the mount of the root filesystem without the mounts on it
// (open_tree(2), Linux 5.2): a view that nobody else sees and that ends with the
// descriptor.
func openImage() image {
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return image{err: fmt.Errorf("look at the root filesystem under its mounts: %w", err)}
	}
	return image{
		dir:   fmt.Sprintf("/proc/self/fd/%d", fd),
		close: func() error { return unix.Close(fd) },
	}
}

func (i image) Close() {
	if i.close != nil {
		_ = i.close() // it was only read
	}
}

// file is a file of the image; there is false where it has none. Its parents
// must not be links: resolve has followed those.
func (i image) file(path string) (content []byte, mode fs.FileMode, there bool, err error) {
	if i.err != nil {
		return nil, 0, false, i.err
	}
	f, err := os.OpenFile(filepath.Join(i.dir, path), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, 0, false, nil
	}
	defer f.Close() // nil with an error
	info, unknown := f.Stat()
	if err != nil || unknown != nil || !info.Mode().IsRegular() {
		return nil, 0, false, errors.New("in the image it is not a regular file")
	}
	content, err = io.ReadAll(io.LimitReader(f, maxImageFile+1))
	if err == nil && len(content) > maxImageFile {
		err = fmt.Errorf("in the image it is larger than %d MiB", maxImageFile>>20)
	}
	return content, info.Mode().Perm(), true, err
}

package boot

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// WriteFile replaces path by data so that a reader sees either the complete old
// content or the complete new one, also after a power cut: temporary file in
// the same directory, fsync, rename, fsync of the directory (see rename(2) and
// fsync(2): the rename itself is durable only after the directory is synced).
// The directory must exist. perm is exact: the umask doesn't apply.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	return WriteFileFor(-1, path, data, perm)
}

// WriteFileFor is WriteFile for a user, who never sees a file of another one; -1 is who calls it.
func WriteFileFor(uid int, path string, data []byte, perm fs.FileMode) (err error) {
	dir, base := filepath.Split(path)
	dir = cmp.Or(dir, ".")
	f, err := os.CreateTemp(dir, "."+base+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	err = f.Chmod(perm)
	if uid >= 0 { // Windows has no owners like these
		err = errors.Join(err, f.Chown(uid, uid))
	}
	if err == nil {
		_, err = f.Write(data)
	}
	if err = cmp.Or(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = SyncDir(dir)
	}
	return err
}

// SyncDir makes creations, renames and removals in dir durable. Windows syncs no directory.
func SyncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// IgnoreMissing is for a file that needn't exist.
func IgnoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Kept is the value that an earlier boot has kept in a file, if any.
func Kept[T any](file string, parse func(string) (T, error)) (was T, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return was, IgnoreMissing(err)
	}
	if was, err = parse(strings.TrimSpace(string(data))); err != nil {
		err = fmt.Errorf("%s: %w", file, err)
	}
	return was, err
}

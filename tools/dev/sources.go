package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A sourceCopy is a copy of a checkout's files at a place that is the same for all of a
// user's checkouts. go test reuses a result where the test program and the files that the
// test opened are what they were, by absolute name, size and time (cmd/go/internal/test).
// A new clone has other names and other times. Here names stay, and a file's time follows
// from its content.
type sourceCopy struct {
	dir  string
	lock *os.File // held while the copy is in use
}

// testCache is a directory of the tests in the user's cache directory.
func testCache(name string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the user's cache directory: %w", err)
	}
	return filepath.Join(cache, "garboard-tests", name), nil
}

// copySources makes the copy with this name the same as the checkout, and waits for others who use it.
func copySources(ctx context.Context, out io.Writer, root, name string) (*sourceCopy, error) {
	dir, err := testCache(name)
	if err != nil {
		return nil, err
	}
	c := &sourceCopy{dir: dir}
	if err := c.take(ctx, out); err != nil {
		return nil, err
	}
	if err := c.sync(ctx, root); err != nil {
		return nil, errors.Join(fmt.Errorf("copy %s to %s: %w", root, c.dir, err), c.lock.Close())
	}
	return c, nil
}

// lockPoll is how often it is looked whether the copy is free.
const lockPoll = 100 * time.Millisecond

func (c *sourceCopy) take(ctx context.Context, out io.Writer) (err error) {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return err
	}
	if c.lock, err = os.OpenFile(c.dir+".lock", os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		err := unix.Flock(int(c.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return errors.Join(&os.PathError{Op: "flock", Path: c.lock.Name(), Err: err}, c.lock.Close())
		}
		if tries == 0 {
			fmt.Fprintf(out, "another checkout's tests use %s; waiting for their end\n", c.dir)
		}
		if err := pause(ctx, lockPoll); err != nil {
			return errors.Join(err, c.lock.Close())
		}
	}
}

// close lets others use the copy.
func (c *sourceCopy) close() error { return c.lock.Close() }

// sync copies what git tracks or would track, and removes all else.
func (c *sourceCopy) sync(ctx context.Context, root string) error {
	list := exec.CommandContext(ctx, "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
	list.Dir = root
	names, err := list.Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	keep := map[string]bool{".": true}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		err := c.copy(filepath.Join(root, name), filepath.Join(c.dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted, and still tracked
		}
		if err != nil {
			return err
		}
		for ; !keep[name]; name = filepath.Dir(name) {
			keep[name] = true
		}
	}
	return c.prune(keep)
}

func (c *sourceCopy) copy(from, to string) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", from)
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	mode := 0o644 | info.Mode()&0o111
	is, err := os.Lstat(to)
	if err == nil && is.Mode() == mode && is.ModTime().Equal(contentTime(data)) {
		if had, err := os.ReadFile(to); err == nil && bytes.Equal(had, data) {
			return nil
		}
	}
	if err == nil {
		if err := os.RemoveAll(to); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(to, data, mode); err != nil {
		return err
	}
	if err := os.Chmod(to, mode); err != nil { // whatever the umask is
		return err
	}
	return os.Chtimes(to, time.Time{}, contentTime(data))
}

// contentTime is a time that no other content has, by its hash: a nanosecond before 2006, as
// go test takes no result where a file was changed in the last two seconds.
func contentTime(data []byte) time.Time {
	sum := sha256.Sum256(data)
	return time.Unix(0, int64(binary.BigEndian.Uint64(sum[:])>>4)) // 2^60 ns after 1970
}

// prune removes what the checkout does not have, and gives directories one time.
func (c *sourceCopy) prune(keep map[string]bool) error {
	var dirs []string
	err := filepath.WalkDir(c.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(c.dir, path)
		switch {
		case err != nil:
			return err
		case !keep[name] && d.IsDir():
			if err := os.RemoveAll(path); err != nil {
				return err
			}
			return fs.SkipDir
		case !keep[name]:
			return os.Remove(path)
		case d.IsDir():
			dirs = append(dirs, path)
		}
		return nil
	})
	for _, dir := range dirs {
		err = errors.Join(err, os.Chtimes(dir, time.Time{}, time.Unix(0, 0)))
	}
	return err
}

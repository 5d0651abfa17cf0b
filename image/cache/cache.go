// Package cache keeps the results of long builds: directories, found again by what went into them.
//
// A result is named by a key, the hash of all its inputs, so it is never updated, only added or pruned. One lock file
// per result orders its builders, also across processes: who holds it fills KEY.tmp-*, and renames that to KEY. The
// time of a result is that of its last use. It stays for an hour after that, whoever used it.
//
// The kernel drops locks when a process dies, however it dies. What a dead builder left behind is therefore recognised
// by its lock being free, and no process IDs (which get reused, and mean nothing in another namespace) are needed.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	// keep is how many results of one name stay: the current one, the one of the branch next door, and one to go back
	// to.
	keep = 3
	// keepFor is how long others stay, too, after their last use: longer than a program works with them that asked for
	// them, such as a folder of tests. Machines that tests keep have gigabytes.
	keepFor = time.Hour
	// lockPoll is how often a waiter looks whether another process has finished: unnoticeable after a build of minutes,
	// and cheap.
	lockPoll = 50 * time.Millisecond

	lockSuffix = ".lock"
	tempMark   = ".tmp-"
)

// Store is a directory of finished build results, one per name and key.
type Store struct {
	Dir string
}

// Default is the store that all of the user's checkouts share.
func Default() (*Store, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the user's cache directory: %w", err)
	}
	return &Store{Dir: filepath.Join(dir, "garboard")}, nil
}

// Build returns the directory holding the result of build for these inputs. It must not be written to.
//
// A hit returns at once. Otherwise build runs in a fresh directory next to the result's place, while other callers that
// want the same result wait for it. The directory is synced and renamed into place only if build returns nil and ctx is
// still alive; in all other cases it is removed. The result stays in place for keepFor at least.
func (s *Store) Build(ctx context.Context, name string, inputs []string, build func(ctx context.Context, dir string) error) (string, error) {
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return "", fmt.Errorf("cache name %q: must be a plain file name", name)
	}
	e := entry{dir: filepath.Join(s.Dir, name), key: Key(inputs...)}
	if err := os.MkdirAll(e.dir, 0o755); err != nil {
		return "", fmt.Errorf("make cache directory: %w", err)
	}
	for {
		done, err := e.attempt(ctx, build)
		if err != nil {
			return "", fmt.Errorf("cached build of %s: %w", name, err)
		}
		if done {
			return e.path(), nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("wait for another build of %s: %w", name, ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}

// entry is one possible result.
type entry struct {
	dir string // the directory of all results of this name
	key string
}

func (e entry) path() string     { return filepath.Join(e.dir, e.key) }
func (e entry) lockPath() string { return e.path() + lockSuffix }

// use reports whether the result is there, and marks it as used.
func (e entry) use() bool {
	now := time.Now()
	return os.Chtimes(e.path(), now, now) == nil
}

// attempt uses or makes the result. It reports false when somebody else holds the lock, so that the caller tries again
// later.
func (e entry) attempt(ctx context.Context, build func(context.Context, string) error) (bool, error) {
	if e.use() {
		return true, nil
	}
	lock, err := tryLock(e.lockPath())
	if err != nil || lock == nil {
		return false, err
	}
	defer lock.Close()
	if e.use() {
		return true, nil
	}
	if err := e.make(ctx, build); err != nil {
		// an empty file would stay for each failed attempt; who waits for this one notices (see tryLock)
		_ = os.Remove(e.lockPath())
		return false, err
	}
	e.prune()
	return true, nil
}

// make fills a temporary directory and renames it into place. The caller holds the lock.
func (e entry) make(ctx context.Context, build func(context.Context, string) error) (err error) {
	e.sweep()
	temp, err := os.MkdirTemp(e.dir, e.key+tempMark)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temp))
		}
	}()
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	if err := build(ctx, temp); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err // a build that was told to stop may well have stopped half-way without an error
	}
	if err := syncTree(temp); err != nil {
		return fmt.Errorf("sync result: %w", err)
	}
	if err := os.Rename(temp, e.path()); err != nil {
		return err
	}
	return syncFile(e.dir)
}

// sweep removes what dead builders of this name left behind: temporary directories whose lock is free. The caller holds
// e's own lock.
func (e entry) sweep() {
	temps, _ := filepath.Glob(filepath.Join(e.dir, "*"+tempMark+"*"))
	for _, temp := range temps {
		key, _, _ := strings.Cut(filepath.Base(temp), tempMark)
		if key == e.key {
			_ = os.RemoveAll(temp)
			continue
		}
		other := entry{dir: e.dir, key: key}
		if lock, err := tryLock(other.lockPath()); err == nil && lock != nil {
			_ = os.RemoveAll(temp)
			lock.Close()
		}
	}
}

// prune removes the results that were used longest ago. Nobody waits for a pruned result and the next run tries again,
// so that errors don't matter here.
func (e entry) prune() {
	all, _ := os.ReadDir(e.dir)
	type used struct {
		entry
		at time.Time
	}
	var results []used
	for _, d := range all {
		if info, err := d.Info(); err == nil && d.IsDir() && d.Name() != e.key && !strings.Contains(d.Name(), tempMark) {
			results = append(results, used{entry{e.dir, d.Name()}, info.ModTime()})
		}
	}
	slices.SortFunc(results, func(a, b used) int { return b.at.Compare(a.at) })
	for i, old := range results {
		if i < keep-1 || time.Since(old.at) < keepFor { // one place is for e itself
			continue
		}
		lock, err := tryLock(old.lockPath())
		if err != nil || lock == nil {
			continue
		}
		// First out of sight, then gone: a half-removed directory under the result's name would pass for the result.
		temp := old.path() + tempMark + "pruned"
		if os.Rename(old.path(), temp) == nil && os.RemoveAll(temp) == nil {
			_ = os.Remove(old.lockPath())
		}
		lock.Close()
	}
}

// syncTree makes sure that all below dir is on disk before its name is.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() || d.Type().IsRegular() {
			return syncFile(path)
		}
		return nil
	})
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

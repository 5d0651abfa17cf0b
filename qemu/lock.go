package qemu

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// hold locks a file until release, or until the process ends. The lock is a POSIX one,
// because other processes can get the PID of its holder from the kernel: a PID file could
// be out of date. But the process must not open the file a second time, because closing any
// descriptor of it releases the lock.
func hold(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &lock); err != nil {
		f.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, fmt.Errorf("%s is held by another process", path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if _, err := f.WriteAt([]byte{'\n'}, 0); err != nil { // its time is that of the lock: heldSince
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// heldSince is when a lock was last taken; zero: never.
func heldSince(path string) (at time.Time) {
	if info, err := os.Stat(path); err == nil {
		at = info.ModTime()
	}
	return at
}

const (
	// busyBudget is how long a command waits for another one that works on the same
	// cluster. Making a cluster takes longest, where images are copied and the machine is
	// busy.
	busyBudget = 2 * time.Minute
	busyPoll   = 20 * time.Millisecond
)

// Short locks are bytes of one file. With one file for each cluster, files would stay
// behind.
const (
	portsByte   = 0 // for planning ports
	clusterByte = 1 // and on: for a cluster, by a hash of its name
)

// waitHold locks one byte of the lock file of all clusters, also against goroutines of the
// same process: an open file description lock. The kernel does not report who holds it, and
// releases it when the process ends. waits is called if another command holds it.
func waitHold(ctx context.Context, at int64, waits func()) (release func(), err error) {
	home, err := Home()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(home, ".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	busy, cancel := context.WithTimeout(ctx, busyBudget)
	defer cancel()
	for tried := false; ; tried = true {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !tried {
			waits()
		}
		select {
		case <-busy.Done():
			f.Close()
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, fmt.Errorf("another command has worked on it for %s; wait for it or end it, then try again", busyBudget)
		case <-time.After(busyPoll):
		}
	}
}

// waitFor is for commands that make or remove a cluster: one of them runs at a time.
func waitFor(ctx context.Context, cluster string, waits func()) (release func(), err error) {
	h := fnv.New32a()
	h.Write([]byte(cluster))
	release, err = waitHold(ctx, clusterByte+int64(h.Sum32()), waits)
	if err != nil {
		err = fmt.Errorf("cluster %s: %w", cluster, err)
	}
	return release, err
}

// holder returns the PID of the process that holds the lock, 0 if none does. The calling
// process must not hold it itself.
func holder(path string) (int, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		return 0, fmt.Errorf("lock %s: %w", path, err)
	}
	if lock.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(lock.Pid), nil
}

package qemu

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hold takes a lock file for as long as the process lives or until release. The
// lock is a POSIX one, because that tells others the PID of the living holder: no
// PID file that can be out of date. Its price: the process must not open the file
// a second time, as closing any descriptor of it lets go.
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
	return func() { f.Close() }, nil
}

// waitHold is for locks that are held briefly, also between goroutines of one
// process: an open file description lock. Nobody can be asked who holds it.
func waitHold(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}

// holder is the PID of the process that holds the lock, 0 if none does. The
// process that asks must not be the holder itself.
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

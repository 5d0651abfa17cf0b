//go:build unix

package cache

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	exclusive = unix.LOCK_EX
	shared    = unix.LOCK_SH
)

func flock(f *os.File, how int) (bool, error) {
	for {
		switch err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); {
		case err == nil:
			return true, nil
		case errors.Is(err, unix.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, unix.EINTR):
			return false, fmt.Errorf("flock %s: %w", f.Name(), err)
		}
	}
}

//go:build unix

package cache

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func flock(f *os.File) (bool, error) {
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return true, nil
		case errors.Is(err, unix.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, unix.EINTR):
			return false, fmt.Errorf("flock %s: %w", f.Name(), err)
		}
	}
}

// Filler fills a directory's file system on request of a server, until that server stops
// answering. It uses a file without a name, whose space is free after the process ends.
//
//	filler DIRECTORY URL
package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"

	"golang.org/x/sys/unix"
)

const (
	largest  = 1 << 30 // the first size that is tried
	smallest = 4 << 10 // a block of the file system
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: filler DIRECTORY URL")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(dir, url string) error {
	f, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("open a file without a name in %s: %w", dir, err)
	}
	for size := int64(0); ; {
		answer, err := http.Get(url) // the answer comes when there is something to do
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return nil
		}
		if size, err = fill(f, size); err != nil {
			return err
		}
	}
}

// fill allocates the free space, in ever smaller pieces, and returns the
// resulting size of the file.
func fill(f int, size int64) (int64, error) {
	for piece := int64(largest); piece >= smallest; {
		switch err := unix.Fallocate(f, 0, size, piece); {
		case err == nil:
			size += piece
		case errors.Is(err, unix.ENOSPC):
			piece /= 2
		default:
			return size, fmt.Errorf("take %d bytes: %w", piece, err)
		}
	}
	return size, nil
}

// Filler takes all the room that a directory's file system has, when a server says so,
// and as long as that server answers: it holds a file without a name, which goes with it.
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
	largest  = 1 << 30 // the first piece that is asked for
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
		answer, err := http.Get(url) // which takes as long as nothing is to be done
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

// fill takes what is free, in ever smaller pieces, and returns how long the file is then.
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

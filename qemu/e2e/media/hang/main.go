// Hang is the first process of a system that hangs. Stage 1 runs as it does in others, and starts this program in place
// of stage 2.
package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	rootImage = "/rootfs.sqsh" // only the initramfs has it
	first     = "/init"        // what stage 1 is, and starts again
)

func main() {
	if _, err := os.Stat(rootImage); err == nil {
		fmt.Fprintln(os.Stderr, begin()) // then the kernel panics
		return
	}
	for {
		fmt.Fprintln(os.Stderr, "this system hangs")
		time.Sleep(time.Minute)
	}
}

// begin becomes stage 1, and returns an error.
func begin() error {
	const moved = "/stage1"
	if err := errors.Join(os.Rename(first, moved), os.Link(os.Args[0], first)); err != nil {
		return err
	}
	return unix.Exec(moved, []string{first}, os.Environ())
}

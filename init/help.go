package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/services/system/udev"
)

// askPowerOff is the argument for a power off: the kernel runs this program
// with it (kernel.poweroff_cmd).
const askPowerOff = "--power-off"

// help is this program when it isn't PID 1. The kernel runs it as its modprobe,
// with the arguments "-q -- name" (kernel/module/kmod.c), or to power off. It
// returns the exit status.
func help(args []string) int {
	if err := helpKernel(args); err != nil {
		fmt.Fprintln(os.Stderr, "init:", err)
		return 1
	}
	return 0
}

func helpKernel(args []string) error {
	switch {
	case len(args) == 1 && args[0] == askPowerOff:
		if err := unix.Kill(1, unix.SIGTERM); err != nil {
			return fmt.Errorf("ask PID 1 to power off: %w", err)
		}
		return nil
	case len(args) == 3 && args[0] == "-q" && args[1] == "--":
		return udev.Modprobe(args[2])
	}
	return errors.New("this program is PID 1 of a node: the kernel starts it")
}

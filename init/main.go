// Command init is PID 1 of a node, from the kernel's first process to the last.
//
// On a machine it runs twice. As /init of the initramfs it is stage 1: it
// mounts the root filesystem, a squashfs in the initramfs, and becomes stage 2,
// which is /sbin/init of that filesystem. Stage 2 prepares the machine (mounts,
// kernel settings) and runs the node, a graph of services whose content it
// doesn't know. It stays until something asks for power off, reboot or halt.
//
//	stage 1 ─▶ stage 2: boot steps ─▶ node.Run ─┐
//	           signals, power button, failure ──┴─▶ exit funnel ─▶ reboot(2)
//
// No failure ends PID 1 directly: errors and panics go to the one exit funnel
// (exit.go). It stops everything in order, and within a fixed time, before the
// last system call.
//
// As the first process of a container (`--mode=container`) it doesn't change
// what belongs to the host: kernel settings, devices, the watchdog.
package main

import (
	"context"
	"os"
	"slices"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/trustd"
	"github.com/garboard-os/garboard/services/system/install"
)

// containerFlag is the only way to tell PID 1 that it runs in a container. (The
// kernel also passes parameters of its command line that it doesn't know, so
// other arguments are ignored.)
const containerFlag = "--mode=container"

func main() {
	// In their sandboxes these programs are process 1, too.
	switch {
	case slices.Equal(os.Args[1:], []string{apid.ID}):
		os.Exit(apid.Main())
	case slices.Equal(os.Args[1:], []string{trustd.ID}):
		os.Exit(trustd.Main())
	case slices.Equal(os.Args[1:], []string{install.Command}):
		os.Exit(install.Main(context.Background(), os.Stdin, os.Stdout, os.NewFile(install.Descriptor, "slot")))
	}
	if os.Getpid() != 1 {
		os.Exit(help(os.Args[1:]))
	}
	mode := boot.Machine
	if slices.Contains(os.Args[1:], containerFlag) {
		mode = boot.Container
	}
	if mode == boot.Machine && inInitramfs() {
		stage1()
	}
	stage2(mode)
}

// Command init is PID 1 of a node, from the kernel's first process to the last.
//
// On a machine it runs twice. As /init of the initramfs it is stage 1: it mounts
// the root filesystem, a squashfs that lies beside it, and becomes /sbin/init of
// that: stage 2. Stage 2 prepares the machine (mounts, kernel settings), runs
// the node, a graph of services that it knows nothing about, and stays with it
// until someone wants the machine to power off, reboot or halt.
//
//	stage 1 ─▶ stage 2: boot steps ─▶ node.Run ─┐
//	           signals, power button, failure ──┴─▶ exit funnel ─▶ reboot(2)
//
// Nothing that goes wrong ends PID 1 by itself: errors and panics go into the
// one exit funnel (exit.go), which stops everything in order, and within a
// fixed time, before it lets go of the machine.
//
// As the first process of a container (`--mode=container`) it leaves alone what
// belongs to the host: kernel settings, devices, the watchdog.
package main

import (
	"os"
	"slices"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/trustd"
)

// containerFlag is the one way in which PID 1 learns that it isn't on a machine
// of its own. (The kernel also hands over what it doesn't know of its command
// line, so other arguments mean nothing.)
const containerFlag = "--mode=container"

func main() {
	// In their sandboxes these are process 1, too.
	switch {
	case slices.Equal(os.Args[1:], []string{apid.Command}):
		os.Exit(apid.Main())
	case slices.Equal(os.Args[1:], []string{trustd.Command}):
		os.Exit(trustd.Main())
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

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	// Without it cgroup managers can't set device rules.
	_ "github.com/opencontainers/cgroups/devices"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

// The exit code of this program shows how the node ended.
const (
	exitFailed = 1  // the sandbox itself, with a line on standard error
	exitReboot = 10 // the node asks to be started again
	exitDied   = 11 // PID 1 ended in another way than by powering off or rebooting
	exitKilled = 12 // PID 1 was killed
)

// insideCommand is the second half of node.
const insideCommand = "node-inside"

// nodeEnd is an exit code as an error: nothing went wrong here, the node ended.
type nodeEnd int

func (e nodeEnd) Error() string { return fmt.Sprintf("node ended with code %d", int(e)) }

// runNode runs a node from start to end.
//
// The process must be the first of a new PID namespace (CLONE_NEWPID):
//
//	starter ─ sandbox, PID 1 of an outer namespace ─ the node's PID 1 ─ …
//
// So the kernel itself ends everything in the node when this process ends, in
// whatever way. The starter sets a parent-death signal for the same reason.
// (libcontainer's own one doesn't reach the node: it gets lost in the clones
// between.) A mount namespace it makes itself: what is mounted for the node ends
// with the two, and is never seen on the host.
func runNode(args []string) error {
	if len(args) != 1 {
		return errors.New("node: needs one spec")
	}
	if os.Getpid() != 1 {
		return errors.New("node: must be started as the first process of its own PID namespace (unshare --pid --fork)")
	}
	return inMountNamespace(insideCommand, args[0])
}

// inMountNamespace starts this program again in a new mount namespace, as the command that
// does the rest.
func inMountNamespace(command, spec string) error {
	// Only this thread enters the new namespace; a program that is started from
	// it, in the same process, has all its threads there.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	err := unix.Exec("/proc/self/exe", []string{os.Args[0], command, spec}, os.Environ())
	return fmt.Errorf("start again in the mount namespace: %w", err)
}

// runInside is runNode in its mount namespace.
func runInside(args []string) error {
	if len(args) != 1 || os.Getpid() != 1 {
		return fmt.Errorf("%s is for node to call", insideCommand)
	}
	// Children are started from this thread, and their fate hangs on it.
	runtime.LockOSThread()
	spec, err := readSpec(os.Stdin)
	if err != nil {
		return err
	}
	root, state, err := workMounts(spec.Work, unix.MS_NOSUID|unix.MS_NODEV, "mode=0700", 0o700)
	if err != nil {
		return err
	}
	// /proc shows our PID namespace, as libcontainer looks for its child there.
	if err := unix.Mount("proc", "/proc", "proc", quiet, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := mountRootfs(spec.Rootfs, root); err != nil {
		return err
	}
	config, err := nodeConfig(spec, root)
	if err != nil {
		return err
	}
	console, err := os.OpenFile(spec.Console, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	container, err := libcontainer.Create(state, spec.ID, config)
	if err != nil {
		return fmt.Errorf("create node %s: %w", spec.ID, err)
	}
	ended, err := startAndWait(container, spec, console)
	// The node is dead by now, or never lived; its pods' cgroups still exist.
	if derr := container.Destroy(); derr != nil {
		err = errors.Join(err, fmt.Errorf("remove node %s: %w", spec.ID, derr))
	}
	if err != nil {
		return err
	}
	return ended
}

func startAndWait(container *libcontainer.Container, spec nodeSpec, console *os.File) (ended, err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	process := &libcontainer.Process{
		Args:   spec.Args,
		Env:    []string{"PATH=/sbin:/usr/sbin:/bin:/usr/bin", "TERM=linux"},
		Cwd:    "/",
		Stdout: console,
		Stderr: console,
		Init:   true,
	}
	if err := container.Start(process); err != nil {
		return nil, fmt.Errorf("start node %s: %w", spec.ID, err)
	}
	if err := container.Exec(); err != nil {
		_ = process.Signal(unix.SIGKILL)
		_, _ = process.Wait()
		return nil, fmt.Errorf("start node %s: %w", spec.ID, err)
	}
	// Whoever started us waits for this line.
	if _, err := fmt.Println("started"); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox: tell that node %s started: %v\n", spec.ID, err)
	}
	// Each signal presses the node's power button. How long the node may take is the business of the process that sends
	// them.
	go func() {
		for range signals {
			_ = process.Signal(unix.SIGTERM) // an error means that it's gone
		}
	}()
	ps, err := process.Wait()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		return nil, fmt.Errorf("wait for node %s: %w", spec.ID, err)
	}
	return howEnded(ps.Sys().(syscall.WaitStatus)), nil
}

// howEnded reads the end of PID 1. In a PID namespace, reboot(2) ends the
// namespace, and kills its init with a signal for the command (reboot(2)).
func howEnded(status syscall.WaitStatus) error {
	switch {
	case status.Exited() && status.ExitStatus() == 0:
		return nil
	case status.Signaled() && status.Signal() == syscall.SIGINT: // LINUX_REBOOT_CMD_POWER_OFF, _HALT
		return nil
	case status.Signaled() && status.Signal() == syscall.SIGHUP: // LINUX_REBOOT_CMD_RESTART
		return nodeEnd(exitReboot)
	case status.Signaled() && status.Signal() == syscall.SIGKILL:
		return nodeEnd(exitKilled)
	}
	return nodeEnd(exitDied)
}

// nodeSpec is everything that one node needs to run. Package qemu of this module
// writes it; the two agree by this text, strictly: an unknown key is an error.
type nodeSpec struct {
	// ID names the node on this host: letters, digits and -_+. only.
	ID       string `json:"id"`
	Hostname string `json:"hostname"`
	// Rootfs is a squashfs image or a directory. It is mounted read-only.
	Rootfs string `json:"rootfs"`
	// Work is an empty directory to mount things on. What is mounted there is seen
	// by this process and the node, never by the host.
	Work string `json:"work"`
	// Cgroup is the node's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	// NetDevice is moved from the network namespace that we are started in to the
	// node's, as eth0. Empty: the node has only its loopback.
	NetDevice string `json:"netDevice,omitempty"`
	Binds     []bind `json:"binds,omitempty"`
	// Args is the node's PID 1 with its arguments.
	Args []string `json:"args"`
	// Console is the file that PID 1's output is appended to.
	Console string `json:"console"`
}

// A bind shows a file or directory of the host inside the node.
type bind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// readSpec reads the spec that the provisioner of clusters sends.
func readSpec(r io.Reader) (s nodeSpec, err error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("spec of a node: %w", err)
	}
	return s, nil
}

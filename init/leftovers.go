package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// pollLeftovers is how often the funnel checks whether processes or mounts are
// gone.
const pollLeftovers = 50 * time.Millisecond

// endProcesses sends a signal to every process but this one and waits until none
// is left. In a PID namespace those are the processes in it (kill(2)).
func endProcesses(ctx context.Context, s unix.Signal) error {
	if os.Getpid() != 1 {
		return errors.New("not PID 1: other processes aren't ours")
	}
	for {
		left, err := processes("/proc")
		if err != nil || len(left) == 0 {
			return err
		}
		// Repeatedly: a process may have forked between two signals.
		if err := unix.Kill(-1, s); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill all with %s: %w", unix.SignalName(s), err)
		}
		if !sleep.For(ctx, pollLeftovers) {
			return fmt.Errorf("%d are left: %s", len(left), strings.Join(left, ", "))
		}
	}
}

// kernelThread is a flag of a process (PF_KTHREAD, include/linux/sched.h).
const kernelThread = 0x00200000

// processes names all processes below /proc except this one, kernel threads and zombies.
func processes(proc string) (found []string, err error) {
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return nil, err
	}
	all, err := fs.AllProcs()
	for _, p := range all {
		stat, err := p.Stat() // an error: it has ended meanwhile
		if err == nil && p.PID != os.Getpid() && stat.Flags&kernelThread == 0 && stat.State != "Z" && stat.State != "X" {
			found = append(found, fmt.Sprintf("%s (%d)", stat.Comm, p.PID))
		}
	}
	return found, err
}

// keepMounted are not unmounted: the root and this program, which are in use as
// long as it runs, and file systems without a disk. What is mounted below the
// latter is unmounted, except kernelMounts.
var keepMounted = []string{"/", "/run", "/etc", "/usr/sbin/init"}

// kernelMounts are not unmounted, with everything below: the kernel's
// interfaces, including its log and the watchdog.
var kernelMounts = []string{"/dev", "/proc", "/sys"}

// unmountAll unmounts what is on disks and what is mounted below, last mount
// first, repeatedly until all is gone. On a machine, it makes busy file systems
// read-only, which writes their data and leaves them clean. In a container that
// would make the whole file system of the host read-only.
func unmountAll(ctx context.Context, mode boot.Mode) error {
	for {
		left, err := toUnmount()
		if err != nil || len(left) == 0 {
			return err
		}
		var errs []error
		for _, target := range left {
			if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
				errs = append(errs, fmt.Errorf("unmount %s: %w", target, err))
			}
		}
		if len(errs) == 0 {
			continue
		}
		if !sleep.For(ctx, pollLeftovers) {
			if mode == boot.Container {
				return errors.Join(errs...)
			}
			for _, target := range left {
				// The error of the unmount is the one to report.
				_ = unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
			}
			return errors.Join(errs...)
		}
	}
}

func toUnmount() ([]string, error) {
	targets, err := mountedAt()
	slices.Reverse(targets)
	return slices.DeleteFunc(targets, func(target string) bool {
		return slices.Contains(keepMounted, target) || slices.ContainsFunc(kernelMounts, func(keep string) bool {
			return target == keep || strings.HasPrefix(target, keep+"/")
		})
	}), err
}

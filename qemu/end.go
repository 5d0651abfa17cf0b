package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"time"

	"github.com/garboard-os/garboard/qemu/container/cgroup"
	"golang.org/x/sys/unix"
)

// stopHost ends a cluster's host process and waits until it has ended. The budget is for
// the nodes to power off.
func stopHost(ctx context.Context, d clusterDir, budget time.Duration) error {
	pid, err := holder(d.lock())
	if err != nil || pid == 0 {
		return err
	}
	// With a descriptor, because another process could get the same PID.
	process, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("host process %d: %w", pid, err)
	}
	defer unix.Close(process)
	// A process that does not answer is killed below.
	end := time.Now().Add(budget + endBudget)
	asking, cancel := context.WithDeadline(ctx, end)
	_ = ask(asking, d, http.MethodPost, "/stop?budget="+budget.String(), nil)
	cancel()
	if ended, err := awaitEnd(ctx, process, time.Until(end)); ended || err != nil {
		return err
	}
	if err := unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0); err != nil {
		return fmt.Errorf("kill host process %d: %w", pid, err)
	}
	ended, err := awaitEnd(ctx, process, endBudget)
	if err == nil && !ended {
		err = fmt.Errorf("host process %d can't be killed", pid)
	}
	return err
}

// awaitEnd waits for the end of a process.
func awaitEnd(ctx context.Context, pidfd int, budget time.Duration) (ended bool, err error) {
	for end := time.Now().Add(budget); time.Now().Before(end); {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(endPoll.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, fmt.Errorf("wait for the host process: %w", err)
		}
		if n > 0 {
			return true, nil
		}
	}
	return false, nil
}

// Stop powers off all nodes of a cluster. Its state stays, for the next Up.
func Stop(ctx context.Context, name string) error {
	c, err := Open(name)
	if err != nil {
		return err
	}
	return alone(ctx, name, func() error { return stopHost(ctx, c.dir, c.stopBudget()) })
}

// Down removes a cluster and all its files and processes, also one that was killed in any
// state. It is no error if the cluster does not exist.
func Down(ctx context.Context, name string) error {
	d, err := dirOf(name)
	if err != nil {
		return err
	}
	return alone(ctx, name, func() error { return remove(ctx, d) })
}

// alone does something with a cluster while no other command works on it.
func alone(ctx context.Context, name string, do func() error) error {
	release, err := waitFor(ctx, name, func() {})
	if err != nil {
		return err
	}
	defer release()
	return do()
}

// remove is Down without waiting for other commands. The nodes' power is cut, because their
// data is removed in any case. The plan is removed first: without it, there is no cluster.
// If this is killed, the next command removes the rest.
func remove(ctx context.Context, d clusterDir) error {
	if err := stopHost(ctx, d, 0); err != nil {
		return err
	}
	if err := cgroup.Remove(d.cgroup()); err != nil {
		return err
	}
	if plan, err := readPlan(d); err == nil && plan.Provisioner == Docker {
		if err := removeFromDocker(ctx, plan, d); err != nil {
			return err
		}
	}
	if err := os.Remove(d.plan()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(string(d))
}

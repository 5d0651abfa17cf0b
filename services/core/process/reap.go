package process

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// collect waits for the child's end and takes its exit status.
func (c *Child) collect() {
	awaitExit(c.pid)
	t := c.table
	t.mu.Lock()
	state, err := c.cmd.Process.Wait()
	delete(t.known, c.pid)
	if t.cutShort {
		// An error of this sweep is met again by the next one.
		_, _ = t.sweep()
	}
	t.mu.Unlock()

	// The status is taken; cmd.Wait is left to end the copying of the output,
	// within cmd.WaitDelay. It finds no process to wait for, forgets the state,
	// and reports that, which is no news.
	_ = c.cmd.Wait()
	c.cmd.ProcessState = state
	c.err = c.exitError(state, err)
	close(c.done)
}

// Reap is one sweep: it reaps the zombies that nobody in this program waits for
// and returns how many there were. PID 1 calls it on each SIGCHLD. Signals of
// that kind merge, so a sweep goes on until nothing is left.
func (t *Table) Reap() (reaped int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sweep()
}

// sweep asks the kernel for the first zombie. An orphan is reaped; one of ours stands in the way of those behind it,
// and whoever collects that one, which is at once, sweeps again. The caller holds mu.
func (t *Table) sweep() (reaped int, err error) {
	t.cutShort = false
	defer func() { t.reaped += uint64(reaped) }()
	for {
		pid, err := firstZombie()
		if err != nil || pid == 0 {
			return reaped, err
		}
		if t.known[pid] != nil {
			t.cutShort = true
			return reaped, nil
		}
		n, err := reapOne(pid)
		if err != nil {
			return reaped, err
		}
		reaped += n
	}
}

// firstZombie returns the PID of a child that has ended and leaves it there; 0
// means that there is none (waitid(2): si_pid is zero with WNOHANG).
func firstZombie() (int, error) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, nil)
		switch {
		case err == nil:
			return zombiePID(&info), nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			return 0, nil
		default:
			return 0, fmt.Errorf("waitid for any child: %w", err)
		}
	}
}

// zombiePID reads si_pid, which x/sys/unix leaves without a name: it begins the
// union that follows three int32 at a pointer's alignment (sigaction(2)).
func zombiePID(info *unix.Siginfo) int {
	const word = unsafe.Sizeof(uintptr(0))
	const offset = (unsafe.Sizeof([3]int32{}) + word - 1) &^ (word - 1)
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(info), offset)))
}

// awaitExit blocks until pid, a child of ours, has ended, and leaves its status
// to be taken. Another error than an interruption can't be told from the end:
// the wait that follows reports it.
func awaitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func reapOne(pid int) (reaped int, err error) {
	for {
		got, err := unix.Wait4(pid, nil, unix.WNOHANG|unix.WALL, nil)
		switch {
		case err == nil && got == pid:
			return 1, nil
		case err == nil, errors.Is(err, unix.ECHILD):
			return 0, nil
		case errors.Is(err, unix.EINTR):
		default:
			return 0, fmt.Errorf("wait for orphan %d: %w", pid, err)
		}
	}
}

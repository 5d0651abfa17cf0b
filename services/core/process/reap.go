package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// sweep asks the kernel for the first zombie. An orphan is reaped; one of ours
// stands in the way of those behind it, which are then found in /proc. What may
// be missed there (a thread that ends hands its children to another one while
// we read; /proc/…/children needs CONFIG_PROC_CHILDREN) is swept again when the
// one in the way has been collected. The caller holds mu.
func (t *Table) sweep() (reaped int, err error) {
	t.cutShort = false
	defer func() { t.reaped += uint64(reaped) }()
	for {
		pid, err := firstZombie()
		if err != nil || pid == 0 {
			return reaped, err
		}
		if t.known[pid] == nil {
			n, err := reapOne(pid)
			if err != nil {
				return reaped, err
			}
			reaped += n
			continue
		}
		n, err := t.sweepListed()
		reaped += n
		if err != nil || n == 0 {
			t.cutShort = true
			return reaped, err
		}
	}
}

// sweepListed reaps those of the listed children that aren't ours. It need not
// know which of them are zombies: WNOHANG leaves the living alone.
func (t *Table) sweepListed() (reaped int, err error) {
	pids, err := t.children()
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return 0, nil
		}
		return 0, err
	}
	for _, pid := range pids {
		if t.known[pid] != nil {
			continue
		}
		n, err := reapOne(pid)
		if err != nil {
			return reaped, err
		}
		reaped += n
	}
	return reaped, nil
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

// procChildren lists our children, of all threads: the kernel keeps them per
// thread (proc_pid_task_children(5)).
func procChildren() ([]int, error) {
	const tasks = "/proc/self/task"
	threads, err := os.ReadDir(tasks)
	if err != nil {
		return nil, err
	}
	var pids []int
	var missing error
	for _, thread := range threads {
		data, err := os.ReadFile(filepath.Join(tasks, thread.Name(), "children"))
		if errors.Is(err, fs.ErrNotExist) {
			missing = err // that thread has ended, or the kernel lacks the file
			continue
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return nil, err
		}
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("parse %s/%s/children: %w", tasks, thread.Name(), err)
			}
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		return nil, missing
	}
	return pids, nil
}

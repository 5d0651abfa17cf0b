package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
	"golang.org/x/sys/unix"
)

const (
	cgroupMount = "/sys/fs/cgroup"
	// busyBudget is how long the killed may take to be gone: at once, but for
	// hanging system calls. pollBusy is how often that is looked at.
	busyBudget = 2 * time.Second
	pollBusy   = 10 * time.Millisecond
)

// cgroup is the path of a service's cgroup from the top of each hierarchy. There is
// one with cgroup v2, which every machine has; a container node has what its host
// has, and with v1 that is one hierarchy per controller.
type cgroup string

// dirs are those that exist.
func (c cgroup) dirs() ([]string, error) {
	var found []string
	for _, pattern := range []string{cgroupMount, cgroupMount + "/*"} {
		matches, err := filepath.Glob(filepath.Join(pattern, string(c), "cgroup.procs"))
		if err != nil {
			return nil, fmt.Errorf("find cgroup %s: %w", c, err)
		}
		for _, m := range matches {
			found = append(found, filepath.Dir(m))
		}
	}
	return found, nil
}

// remove kills all that is in the cgroup, and removes it. Nothing there is fine.
// (A sandboxed service can't make cgroups, so there are none below.)
func (c cgroup) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, busyBudget)
	defer cancel()
	dirs, err := c.dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		for {
			if err = removeDir(dir); !errors.Is(err, unix.EBUSY) {
				break
			}
			if !sleep.For(ctx, pollBusy) {
				return fmt.Errorf("still busy after %s: %w", busyBudget, err)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeDir is one try.
func removeDir(dir string) error {
	if err := killAll(dir); err != nil {
		return err
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("rmdir %s: %w", dir, err)
	}
	return nil
}

func killAll(dir string) error {
	kill, err := os.OpenFile(filepath.Join(dir, "cgroup.kill"), os.O_WRONLY, 0)
	if err == nil {
		_, err = kill.WriteString("1\n")
		kill.Close()
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// cgroup v1, or gone.
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
		return err
	}
	for _, field := range strings.Fields(string(procs)) {
		// 0 is a process that our PID namespace doesn't show: none of ours, and to
		// kill(2) it would mean ourselves.
		pid, err := strconv.Atoi(field)
		if err != nil || pid <= 1 {
			return fmt.Errorf("kill all in %s: %q isn't a process of ours", dir, field)
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill %d in %s: %w", pid, dir, err)
		}
	}
	return nil
}

// memoryEvents are the files that count, among others, how often the kernel killed
// for want of memory: of cgroup v2 and of v1. Both have a line "oom_kill N".
var memoryEvents = []string{"memory.events", "memory.oom_control"}

// outOfMemory reports whether the kernel has killed a process of this cgroup because of
// its memory limit.
func (c cgroup) outOfMemory() (bool, error) {
	dirs, err := c.dirs()
	if err != nil {
		return false, err
	}
	for _, dir := range dirs {
		for _, name := range memoryEvents {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return false, err
			}
			for line := range strings.Lines(string(data)) {
				if count, ok := strings.CutPrefix(line, "oom_kill "); ok && strings.TrimSpace(count) != "0" {
					return true, nil
				}
			}
		}
	}
	return false, nil
}

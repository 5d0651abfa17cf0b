// Package cgroup freezes, limits and removes the cgroups of container nodes, from outside of
// the nodes.
//
// A node's cgroup is one directory in each mounted hierarchy: several on a host with cgroup
// v1 or both versions ("hybrid"), one where there is only v2. While a node runs, its sandbox
// program manages them. A sandbox program that was killed leaves them behind: the kernel does
// not remove cgroups by itself.
package cgroup

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Parent holds the cgroups of all clusters.
const Parent = "/garboard"

const (
	// busyBudget is how long a cgroup may stay busy after its processes were killed: the
	// kernel removes them only when they have really ended, and one that waits for a slow
	// disk ends when the disk has written.
	busyBudget = time.Minute
	busyPoll   = 10 * time.Millisecond
)

// A Hierarchy is one mounted tree of cgroups.
type Hierarchy struct {
	Mount       string
	Controllers []string // v1 only
	Unified     bool     // v2
}

// Hierarchies returns those of this machine.
func Hierarchies() ([]Hierarchy, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parse(f)
}

// parse reads mountinfo (proc_pid_mountinfo(5)). Mounts that show only a part of
// their hierarchy, as in containers, are left out: a path from the top can't be
// found through them. So are those that a later mount hides.
func parse(mounts io.Reader) (all []Hierarchy, err error) {
	infos, err := mountinfo.GetMountsFromReader(mounts, nil)
	for _, m := range infos {
		all = slices.DeleteFunc(all, func(h Hierarchy) bool {
			return h.Mount == m.Mountpoint || strings.HasPrefix(h.Mount, m.Mountpoint+"/")
		})
		switch {
		case m.Root != "/":
		case m.FSType == "cgroup2":
			all = append(all, Hierarchy{Mount: m.Mountpoint, Unified: true})
		case m.FSType == "cgroup":
			all = append(all, Hierarchy{Mount: m.Mountpoint, Controllers: strings.Split(m.VFSOptions, ",")})
		}
	}
	return all, err
}

// Remove removes a cgroup and all below it in every hierarchy. Cgroups above it stay, even
// if they are empty: another node or cluster may be about to make its own there. It is no
// error if the cgroup does not exist.
func Remove(path string) error {
	hierarchies, err := Hierarchies()
	if err != nil {
		return err
	}
	thaw(hierarchies, path)
	end := time.Now().Add(busyBudget)
	var errs []error
	for _, h := range hierarchies {
		errs = append(errs, removeTree(filepath.Join(h.Mount, path), end))
	}
	return errors.Join(errs...)
}

// thaw thaws a cgroup and all below it, each of which has a state of its own. With cgroup
// v1, a process that was killed while it was frozen ends only then.
func thaw(hierarchies []Hierarchy, path string) {
	file, value, err := freezer(hierarchies, path, false)
	if err != nil {
		return
	}
	_ = filepath.WalkDir(filepath.Dir(file), func(dir string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil // gone meanwhile
		}
		if f, err := os.OpenFile(filepath.Join(dir, filepath.Base(file)), os.O_WRONLY, 0); err == nil {
			_, _ = f.WriteString(value)
			f.Close()
		}
		return nil
	})
}

func removeTree(dir string, end time.Time) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name()), end); err != nil {
				return err
			}
		}
	}
	for {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return fmt.Errorf("remove cgroup %s: %w%s", dir, err, remaining(dir))
		}
		time.Sleep(busyPoll)
	}
}

// remaining names the processes that keep a cgroup busy.
func remaining(dir string) string {
	pids, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	var all []string
	for _, pid := range strings.Fields(string(pids)) {
		name, _ := os.ReadFile("/proc/" + pid + "/comm")
		all = append(all, strings.TrimSpace(string(name))+" (PID "+pid+")")
	}
	if len(all) == 0 {
		return ""
	}
	return "; processes in it that haven't ended: " + strings.Join(all, ", ")
}

// Limits are the largest share of the machine that a cgroup may use; 0: all of it.
type Limits struct {
	CPUs      int
	MemoryMiB int
}

// period is what a share of the processors is counted in: the kernel's default
// (Documentation/scheduler/sched-bwc.rst).
const period = 100 * time.Millisecond

// Limit sets the limits of a cgroup that exists.
func Limit(path string, l Limits) error {
	hierarchies, err := Hierarchies()
	if err != nil {
		return err
	}
	files, err := l.files(hierarchies, path)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := os.WriteFile(f.path, []byte(f.value), 0o644); err != nil {
			return fmt.Errorf("limit cgroup: %w", err)
		}
	}
	return nil
}

// In is where a cgroup is for a controller, and whether it is one of v2.
func In(controller, path string) (dir string, unified bool, err error) {
	hierarchies, err := Hierarchies()
	if err != nil {
		return "", false, err
	}
	return in(hierarchies, controller, path)
}

func in(hierarchies []Hierarchy, controller, path string) (dir string, unified bool, err error) {
	i := slices.IndexFunc(hierarchies, func(h Hierarchy) bool { return slices.Contains(h.Controllers, controller) })
	if i < 0 {
		i = slices.IndexFunc(hierarchies, func(h Hierarchy) bool { return h.Unified })
	}
	if i < 0 {
		return "", false, fmt.Errorf("no cgroup hierarchy with the controller %s", controller)
	}
	return filepath.Join(hierarchies[i].Mount, path), hierarchies[i].Unified, nil
}

// file is a setting of a cgroup.
type file struct{ path, value string }

// files are what the limits are written to, in the hierarchy that has the controller.
func (l Limits) files(hierarchies []Hierarchy, path string) (all []file, err error) {
	if l.CPUs > 0 {
		dir, unified, err := in(hierarchies, "cpu", path)
		if err != nil {
			return nil, err
		}
		quota := int64(l.CPUs) * period.Microseconds()
		if unified {
			all = append(all, file{filepath.Join(dir, "cpu.max"), fmt.Sprint(quota, " ", period.Microseconds())})
		} else {
			all = append(all, file{filepath.Join(dir, "cpu.cfs_period_us"), fmt.Sprint(period.Microseconds())},
				file{filepath.Join(dir, "cpu.cfs_quota_us"), fmt.Sprint(quota)})
		}
	}
	if l.MemoryMiB > 0 {
		dir, unified, err := in(hierarchies, "memory", path)
		if err != nil {
			return nil, err
		}
		name := "memory.limit_in_bytes"
		if unified {
			name = "memory.max"
		}
		all = append(all, file{filepath.Join(dir, name), fmt.Sprint(int64(l.MemoryMiB) << 20)})
	}
	return all, nil
}

// Freeze stops every process in a cgroup, or lets them run again.
func Freeze(path string, frozen bool) error {
	hierarchies, err := Hierarchies()
	if err != nil {
		return err
	}
	file, value, err := freezer(hierarchies, path, frozen)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(value), 0o644)
}

func freezer(hierarchies []Hierarchy, path string, frozen bool) (file, value string, err error) {
	dir, unified, err := in(hierarchies, "freezer", path)
	name, values := "freezer.state", map[bool]string{false: "THAWED", true: "FROZEN"}
	if unified {
		name, values = "cgroup.freeze", map[bool]string{false: "0", true: "1"}
	}
	return filepath.Join(dir, name), values[frozen], err
}

//go:build e2e

package e2etest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Processes are the PIDs, on this machine, of the container nodes' processes with
// this program name.
func (c *Cluster) Processes(name string) ([]int, error) { return c.processes("", name) }

// processes are those of one node, or of all if node is "".
func (c *Cluster) processes(node, name string) ([]int, error) {
	cluster, place := "/garboard/"+c.Name+".", "/"
	if node != "" {
		place += node + "/"
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var found []int
	for _, dir := range dirs {
		in, err := os.ReadFile(dir + "/cgroup")
		if _, below, ours := strings.Cut(string(in), cluster); err != nil || !ours || !strings.Contains(below, place) {
			continue // it has ended meanwhile, or belongs to another user
		}
		arguments, _ := os.ReadFile(dir + "/cmdline")
		program, _, _ := strings.Cut(string(arguments), "\x00")
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err == nil && filepath.Base(program) == name {
			found = append(found, pid)
		}
	}
	slices.Sort(found)
	return found, nil
}

// Kill sends SIGKILL to the one process with this name, of all container nodes.
func (c *Cluster) Kill(name string) error { return c.KillOn("", name) }

// KillOn sends SIGKILL to the one process of a container node with this name.
func (c *Cluster) KillOn(node, name string) error {
	pids, err := c.processes(node, name)
	if err != nil {
		return err
	}
	if len(pids) != 1 {
		return fmt.Errorf("there are %d processes %s, not one: %v", len(pids), name, pids)
	}
	return syscall.Kill(pids[0], syscall.SIGKILL)
}

// KillHost sends SIGKILL to the cluster's host process.
func (c *Cluster) KillHost() error {
	pid, err := c.HostPID()
	if err != nil {
		return err
	}
	if pid == 0 {
		return errors.New("there is no host process")
	}
	return syscall.Kill(pid, syscall.SIGKILL)
}

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
)

// ownCgroup is the cgroup of PID 1 and its direct children: in cgroup v2 a
// group that delegates controllers can't have processes of its own
// (Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint").
const ownCgroup = "init"

// The weights of the cgroups for processor time, for each processor. The kubelet gives all
// pods together 39 for each processor. The kernel's default is 100 for a cgroup: then, on an
// overloaded machine with two processors, the API server gets less time than its clients,
// and the clients repeat requests that took too long.
const (
	ownWeight    = 20 // PID 1, containerd and the shims
	systemWeight = 40 // boot.SystemCgroup
	maxWeight    = 100
)

// delegateCgroups moves PID 1 into a leaf below root, enables all controllers for root's
// other children, and gives each its weight. A host with cgroup v1 hierarchies at root has
// nothing to delegate.
func delegateCgroups(root string) error {
	var stat unix.Statfs_t
	if err := unix.Statfs(root, &stat); err != nil {
		return fmt.Errorf("stat %s: %w", root, err)
	}
	if stat.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil
	}
	leaf := filepath.Join(root, ownCgroup)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte("0\n"), 0); err != nil {
		return fmt.Errorf("move PID 1 into cgroup %s: %w", leaf, err)
	}
	controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	// One by one: the kernel accepts all controllers of a line or none.
	var errs []error
	for _, c := range strings.Fields(string(controllers)) {
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+c+"\n"), 0); err != nil {
			errs = append(errs, fmt.Errorf("enable cgroup controller %s: %w", c, err))
		}
	}
	for group, weight := range map[string]int{ownCgroup: ownWeight, boot.SystemCgroup: systemWeight} {
		errs = append(errs, setWeight(filepath.Join(root, group), min(weight*runtime.NumCPU(), maxWeight)))
	}
	return errors.Join(errs...)
}

func setWeight(group string, weight int) error {
	if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.WriteFile(filepath.Join(group, "cpu.weight"), []byte(strconv.Itoa(weight)), 0)
}

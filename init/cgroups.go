package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ownCgroup is the cgroup of PID 1 and its direct children: in cgroup v2 a
// group that delegates controllers can't have processes of its own
// (Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint").
const ownCgroup = "init"

// delegateCgroups moves PID 1 into a leaf below root and enables all
// controllers for root's other children. A host with cgroup v1 hierarchies at
// root has nothing to delegate.
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
	return errors.Join(errs...)
}

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	unifiedRoot = "/sys/fs/cgroup" // where a host with only cgroup v2 has it
	leafName    = "init"
)

// enterLeaf moves the node's PID 1 into a child of its cgroup and gives the
// controllers to the children.
//
// A real machine's PID 1 sits in the root cgroup, which alone may have both
// processes and controlled children ("no internal process constraint" in the
// kernel's cgroup-v2.rst). The root that a node sees in its namespace isn't
// that: with PID 1 in it, neither containerd nor the kubelet could turn a
// controller on.
func enterLeaf(cgroup string, pid int) error {
	leaf := filepath.Join(cgroup, leafName)
	if err := os.Mkdir(leaf, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
		return fmt.Errorf("move PID 1 of the node: %w", err)
	}
	available, err := os.ReadFile(filepath.Join(cgroup, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(available)) {
		if err := os.WriteFile(filepath.Join(cgroup, "cgroup.subtree_control"), []byte("+"+c), 0o644); err != nil {
			return fmt.Errorf("turn on controller %s: %w", c, err)
		}
	}
	return nil
}

package main

import (
	"encoding/json"
	"fmt"
	"io"
)

// nodeSpec is everything that one node needs to run. Package qemu of this module
// writes it; the two agree by this text, strictly: an unknown key is an error.
type nodeSpec struct {
	// ID names the node on this host: letters, digits and -_+. only.
	ID       string `json:"id"`
	Hostname string `json:"hostname"`
	// Rootfs is a squashfs image or a directory. It is mounted read-only.
	Rootfs string `json:"rootfs"`
	// Work is an empty directory to mount things on. What is mounted there is seen
	// by this process and the node, never by the host.
	Work string `json:"work"`
	// Cgroup is the node's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	// NetDevice is moved from the network namespace that we are started in to the
	// node's, as eth0. Empty: the node has only its loopback.
	NetDevice string `json:"netDevice,omitempty"`
	Binds     []bind `json:"binds,omitempty"`
	// Args is the node's PID 1 with its arguments.
	Args []string `json:"args"`
	// Console is the file that PID 1's output is appended to.
	Console string `json:"console"`
}

// A bind shows a file or directory of the host inside the node.
type bind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// readSpec reads the spec that the provisioner of clusters sends.
func readSpec(r io.Reader) (s nodeSpec, err error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("spec of a node: %w", err)
	}
	return s, nil
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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

func readSpec(path string) (nodeSpec, error) {
	in := os.Stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nodeSpec{}, err
		}
		defer f.Close()
		in = f
	}
	s, err := decodeSpec(in)
	if err != nil {
		return nodeSpec{}, fmt.Errorf("spec %s: %w", path, err)
	}
	return s, nil
}

func decodeSpec(r io.Reader) (nodeSpec, error) {
	var s nodeSpec
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return nodeSpec{}, err
	}
	return s, s.check()
}

// check reports everything that is wrong at once.
func (s nodeSpec) check() error {
	var errs []error
	if s.ID == "" {
		errs = append(errs, errors.New("id: empty"))
	}
	if s.Hostname == "" {
		errs = append(errs, errors.New("hostname: empty"))
	}
	if len(s.Args) == 0 {
		errs = append(errs, errors.New("args: empty"))
	}
	errs = append(errs, absolute("rootfs", s.Rootfs))
	errs = append(errs, absolute("work", s.Work))
	errs = append(errs, absolute("cgroup", s.Cgroup))
	errs = append(errs, absolute("console", s.Console))
	if s.Cgroup == "/" {
		// The whole host would be frozen or killed with the node.
		errs = append(errs, errors.New("cgroup: the root cgroup is the host's"))
	}
	for i, b := range s.Binds {
		errs = append(errs, absolute(fmt.Sprintf("binds[%d].source", i), b.Source))
		errs = append(errs, absolute(fmt.Sprintf("binds[%d].target", i), b.Target))
	}
	return errors.Join(errs...)
}

// absolute is what is wrong with a path; nil for nothing.
func absolute(what, path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return fmt.Errorf("%s: %q isn't a clean absolute path", what, path)
	}
	return nil
}

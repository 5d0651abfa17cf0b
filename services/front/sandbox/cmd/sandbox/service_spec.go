package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// serviceSpec is everything that one sandboxed service needs to run. Package
// sandboxed of this module writes it; the two agree by this text, strictly.
type serviceSpec struct {
	// ID names the service: letters, digits and -_+. only.
	ID string `json:"id"`
	// Args is the program with its arguments; one of Binds shows it.
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"`
	// UID is the user and the group that the service runs as. It is the same one
	// inside and outside.
	UID int `json:"uid"`
	// Work is an empty directory for mounts. All users may search it: the root of a user
	// namespace is user nobody outside.
	Work string `json:"work"`
	// Cgroup is the service's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	Binds  []bind `json:"binds"`

	MemoryMax   int64 `json:"memoryMax"` // bytes
	TasksMax    int64 `json:"tasksMax"`  // threads and processes
	OOMScoreAdj int   `json:"oomScoreAdj"`
}

// The range of user IDs that a service may have: root never, and none of those
// that the kubelet gives to pods with user namespaces, 65536 and up.
const (
	minServiceUID = 1
	maxServiceUID = 4999
)

func decodeServiceSpec(line []byte) (serviceSpec, error) {
	var s serviceSpec
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return serviceSpec{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return serviceSpec{}, errors.New("something follows the spec")
	}
	return s, s.check()
}

// check reports everything that is wrong at once.
func (s serviceSpec) check() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.ID == "" {
		wrong("id: empty")
	}
	if s.UID < minServiceUID || s.UID > maxServiceUID {
		wrong("uid: %d isn't in %d to %d", s.UID, minServiceUID, maxServiceUID)
	}
	errs = append(errs, absolute("work", s.Work))
	errs = append(errs, absolute("cgroup", s.Cgroup))
	if s.Cgroup == "/" {
		wrong("cgroup: the root cgroup is the node's")
	}
	for i, b := range s.Binds {
		errs = append(errs, absolute(fmt.Sprintf("binds[%d].source", i), b.Source))
		errs = append(errs, absolute(fmt.Sprintf("binds[%d].target", i), b.Target))
		if slash := b.Target == "/"; slash || within(b.Target, "/proc") || within(b.Target, "/dev") {
			wrong("binds[%d].target: %s is the sandbox's own", i, b.Target)
		}
	}
	if len(s.Args) == 0 {
		wrong("args: empty")
	} else if s.program() < 0 {
		wrong("args: no bind shows %s", s.Args[0])
	}
	if s.MemoryMax <= 0 {
		wrong("memoryMax: %d; a service without a ceiling can take the node down", s.MemoryMax)
	}
	if s.TasksMax <= 0 {
		wrong("tasksMax: %d; a service without a ceiling can take the node down", s.TasksMax)
	}
	return errors.Join(errs...)
}

// program is the index of the bind that shows the service's program, or -1.
func (s serviceSpec) program() int {
	return slices.IndexFunc(s.Binds, func(b bind) bool { return b.Target == s.Args[0] })
}

// within reports whether a clean path is dir or below it.
func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

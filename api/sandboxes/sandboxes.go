// Package sandboxes is the protocol with the sandbox program (services/front/sandbox/cmd/sandbox), which makes the
// sandboxes of a node's services for PID 1, and runs nodes as containers for package qemu. All of it is JSON, and an
// unknown key is an error.
package sandboxes

import (
	"encoding/json"
	"io"
)

// Service is everything that one sandboxed service needs to run. PID 1 sends it as one line.
type Service struct {
	// ID names the service: letters, digits and -_+. only.
	ID string `json:"id"`
	// Args is the program with its arguments.
	Args []string `json:"args"`
	Env  []string `json:"env"`
	// UID is the user and the group that the service runs as. It is the same one
	// inside and outside.
	UID int `json:"uid"`
	// Work is an empty directory for mounts. All users may search it: the root of a user
	// namespace is user nobody outside.
	Work string `json:"work"`
	// Cgroup is the service's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	// Dir is visible inside, read-only, as the program is.
	Dir string `json:"dir"`

	MemoryMax   int64 `json:"memoryMax"` // bytes
	TasksMax    int64 `json:"tasksMax"`  // threads and processes
	OOMScoreAdj int   `json:"oomScoreAdj"`
}

// Reply is the answer to PID 1 about a complete sandbox, in one line.
type Reply struct {
	// PID is the service's process, as PID 1 sees it.
	PID int `json:"pid"`
	// Without lists what the sandbox lacks here, and why. PID 1 logs it.
	Without []string `json:"without,omitempty"`
}

// Go is PID 1's leave to run the service, a line.
const Go = "go\n"

// Node is everything that one node needs to run.
type Node struct {
	// ID names the node on this host: letters, digits and -_+. only.
	ID       string `json:"id"`
	Hostname string `json:"hostname"`
	// Rootfs is a squashfs image or a directory. It is mounted read-only.
	Rootfs string `json:"rootfs"`
	// Work is an empty directory to mount things on. What is mounted there is seen
	// by the program and the node, never by the host.
	Work string `json:"work"`
	// Cgroup is the node's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	// NetDevice is moved from the network namespace that the program is started in to the
	// node's, as eth0. Empty: the node has only its loopback.
	NetDevice string `json:"netDevice,omitempty"`
	Binds     []Bind `json:"binds,omitempty"`
	// Args is the node's PID 1 with its arguments.
	Args []string `json:"args"`
	// Console is the file that PID 1's output is appended to.
	Console string `json:"console"`
}

// A Bind shows a file or directory of the host inside the node.
type Bind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// The exit code of the program shows how a node ended.
const (
	ExitFailed = 1  // the sandbox itself, with a line on standard error
	ExitReboot = 10 // the node asks to be started again
	ExitDied   = 11 // PID 1 ended in another way than by powering off or rebooting
	ExitKilled = 12 // PID 1 was killed
)

// Decode reads one of these values.
func Decode[T any](r io.Reader) (value T, err error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	return value, d.Decode(&value)
}

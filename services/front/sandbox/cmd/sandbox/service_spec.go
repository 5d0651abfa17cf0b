package main

import (
	"bytes"
	"encoding/json"
)

// serviceSpec is everything that one sandboxed service needs to run. Package
// sandboxed of this module writes it; the two agree by this text, strictly.
type serviceSpec struct {
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

func decodeServiceSpec(line []byte) (s serviceSpec, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	return s, d.Decode(&s)
}

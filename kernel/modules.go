package kernel

import (
	"bytes"
	_ "embed"
	"sync"

	"gopkg.in/yaml.v3"
)

// Row is a family of modules that are wanted for one reason.
type Row struct {
	// Names are the modules, separated by blanks, as /proc/modules writes them.
	Names string
	// Why says what a node can't do without them.
	Why string
	// Only is the one flavour that they are for; empty for all.
	Only Flavour
	// Optional modules are taken if they exist. Kernels of other versions or distributions build them in, merge them
	// into another module, or drop them.
	Optional bool
}

//go:embed modules.yaml
var modules []byte

// Modules is the curated list, modules.yaml. It is read when it is first needed.
var Modules = sync.OnceValue(func() (rows []Row) {
	list := yaml.NewDecoder(bytes.NewReader(modules))
	list.KnownFields(true)
	if err := list.Decode(&rows); err != nil {
		panic("modules.yaml: " + err.Error()) // a test reads it
	}
	return rows
})

// Package resource keeps the facts of a node and runs the controllers that make
// them so.
//
// A fact is an Object: namespace, type, ID, version, phase, finalizers, and a
// spec that is a typed Go value. The Store holds them in memory, compares and
// swaps on version, and lets anyone watch. A Controller names the types it reads
// and writes; the Runtime calls its Reconcile when an input changed, and again
// with backoff when it failed. Specs are immutable once stored: to change one,
// Put a new value.
package resource

// Phase of an object's life. A torn-down object stays until its finalizers are
// gone.
type Phase string

const (
	PhaseRunning     Phase = "running"
	PhaseTearingDown Phase = "tearingDown"
)

// Meta is what an object is called, apart from what it says.
type Meta struct {
	Namespace  string
	Type       string // full plural name: StaticPods.kubernetes.garboard.dev
	ID         string
	Version    uint64 // grows by one on each change of the spec
	Phase      Phase
	Finalizers []string
	Owner      string // the controller that writes it
}

// Definition describes a type to users: its names and its table columns
// (acceptance S-005, S-008, S-009).
type Definition struct {
	Type      string   // StaticPods.kubernetes.garboard.dev
	Kind      string   // StaticPod, as tables print it
	Aliases   []string // "bs", beside the lower-case plural that is always one
	Namespace string   // the default one
	Columns   []Column
}

// Column is a type-specific column of `get` tables.
type Column struct {
	Name  string // upper case: READY
	Value func(spec any) string
}

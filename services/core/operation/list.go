package operation

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

func (r *Runner) find(id string) (*execution, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if x := r.operations[id]; x != nil {
		return x, nil
	}
	if !r.read.Load() {
		return nil, fmt.Errorf("operation %q: %w", bounded(id), errUnread)
	}
	return nil, fmt.Errorf("operation %q: %w on this node (any more)", bounded(id), ErrNotFound)
}

// errUnread is why nothing is known of an operation yet.
var errUnread = errors.New("the node has just started, and hasn't read the journals of its operations yet: STATE isn't mounted")

// Running returns the ID of an operation with one of these names that runs, and isn't being
// undone; "": none does.
func (r *Runner) Running(names ...string) (id string, err error) {
	if !r.read.Load() {
		return "", errUnread
	}
	for _, x := range r.all() {
		if rec := x.record(); rec.State == Running && slices.Contains(names, rec.Name) {
			return x.id, nil
		}
	}
	return "", nil
}

// Holds reports whether an operation of this node has the lock of the cluster.
func (r *Runner) Holds() bool {
	return slices.ContainsFunc(r.all(), func(x *execution) bool { rec := x.record(); return rec.State == Running && !rec.Unlocked })
}

// List returns all operations of which the node has a record, oldest first. If there is
// an error, too, they are those of this boot.
func (r *Runner) List() ([]Operation, error) {
	read := r.read.Load()
	var all []Operation
	for _, x := range r.all() {
		x.mu.Lock()
		all = append(all, x.status())
		x.mu.Unlock()
	}
	if !read {
		return all, errUnread
	}
	return all, nil
}

// Get returns one operation.
func (r *Runner) Get(id string) (Operation, error) {
	x, err := r.find(id)
	if err != nil {
		return Operation{}, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.status(), nil
}

// ID owns the resources, and is the log.
const ID = "operations"

// Spec is an operation in a few words.
type Spec struct {
	Name     string    `yaml:"name"`
	State    State     `yaml:"state" column:"STATE"`
	Step     string    `yaml:"step,omitempty" column:"STEP"` // the one that runs
	By       string    `yaml:"by"`
	Began    time.Time `yaml:"began" column:"BEGAN"`
	Ended    time.Time `yaml:"ended,omitempty"`
	Question string    `yaml:"question,omitempty" column:"QUESTION"` // that it waits for an answer to
	Error    string    `yaml:"error,omitempty" column:"ERROR"`
}

// Operations are those that run, and the last ones that ran.
var Operations = resource.Define[Spec](resource.Definition{
	Type:      "Operations.runtime.garboard.dev",
	Kind:      "Operation",
	Aliases:   []string{"op", "ops"},
	Namespace: "runtime",
})

// publish publishes the state of the operation as a resource; the caller holds mu.
func (x *execution) publish() {
	o := x.status()
	spec := Spec{Name: o.Name, State: o.State, By: o.By, Began: o.Began, Ended: o.Ended, Error: o.Error}
	if s := o.Current(); s != nil {
		spec.Step = s.ID
	}
	if o.Question != nil {
		spec.Question = o.Question.Text
	}
	// The store refuses only a type that was never defined.
	_ = Operations.Put(x.r.o.Store.As(ID), x.id, spec)
}

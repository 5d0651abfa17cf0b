package operation

import (
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

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

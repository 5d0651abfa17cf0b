// Package operation runs what changes a node for good, in steps: reboot, shutdown,
// reset.
//
// An operation runs on the node that got the request, also after its client has gone. Its
// plan is a list of steps, which can be shown before it runs. Each step is
// idempotent and has a deadline. A journal on STATE is written before and after
// each step, so that the operation continues after a restart of the node; a step that was
// half undone is undone again. Steps report events, and may ask questions. The
// package doesn't depend on any operation.
//
//	         ┌───── Step.Run, one after another ─────┐
//	Start ─▶ running ──────────────────────────────▶ done
//	            │ abort, or a step fails,
//	            │ before the point of no return
//	            ├─▶ undoing: Step.Undo, in reverse ─▶ aborted, failed
//	            └─ a step fails after it ───────────▶ failed
package operation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

const (
	// maxSteps, maxText and maxArguments bound a journal. No operation has more than
	// two dozen steps; a text is a line or two for a person.
	maxSteps     = 64
	maxText      = 1 << 10
	maxArguments = 64 << 10

	// maxAttempts is how often the same step may be begun: what ends the node each
	// time must not keep it from coming up for ever.
	maxAttempts = 5
)

// Definition is a kind of operation.
type Definition struct {
	// Name in lower case: reset.
	Name string
	// Exclusive operations disrupt the node. One of them runs at a time on a node, and with
	// Options.Lock one in the cluster.
	Exclusive bool
	// Role is the least one that may answer and abort; "" is os:admin.
	Role string
	// WithoutJournal: it continues if the journal can't be written. It is for operations
	// that repair a broken STATE. After a restart there is no record of it.
	WithoutJournal bool
	// Shared: the record is also in Options.Shared, where the other control planes read
	// it, so that one of them can take the operation over.
	Shared bool
	// Plan returns what would be done, or refuses with the reason. It changes nothing. A plan
	// without steps has those of Steps.
	Plan func(ctx context.Context, r Request) (Plan, error)
	// Steps are all steps that a plan for these arguments may have. After a restart, and
	// on a node that takes the operation over, the record has the plan and Steps has its
	// code. It must not look at anything but r: the cluster may be down.
	Steps func(r Request) ([]Step, error)
}

// Request is a request for an operation.
type Request struct {
	// Arguments are for the definition alone to understand. They are kept in the
	// journal, and hold no secrets.
	Arguments []byte
	// By is the user who requests it.
	By string
	// ID of the operation; "" for a dry run.
	ID string
	// Resuming: it began before the node restarted, or on another node.
	Resuming bool
}

// Plan is what an operation does.
type Plan struct {
	Steps []Step
	// Warnings are for the user, before and after the operation begins.
	Warnings []string
	// Unlocked is why it doesn't wait for others in the cluster; "" takes
	// Options.Lock.
	Unlocked string

	data map[string]json.RawMessage // Data.In
}

// Step is a part of a plan.
type Step struct {
	ID   string // unique in the plan: drain
	What string // evict the pods of this node
	// Omit leaves it out. So an operation is one list of all steps that it may have.
	Omit bool
	// Deadline bounds Run, and Undo; the time that a question waits for its answer
	// doesn't count. Never 0.
	Deadline time.Duration
	// Optional: if it fails or isn't done in time, it is skipped, with the reason.
	Optional bool
	// PointOfNoReturn: from its beginning on, the operation can't be aborted, and
	// nothing is undone if it fails.
	PointOfNoReturn bool
	// EndsNode: Run restarts the node or powers it off, and returns at once. The step
	// counts as done before it is run, and the steps after it are for the next boot.
	EndsNode bool
	// Hold is how long the lock of the cluster stays taken after a step that ends the
	// node, unless the operation goes on and takes it again; 0 releases it.
	Hold time.Duration
	// WipesJournal: STATE is gone once it is done; nothing is written down after it.
	WipesJournal bool
	// Run does it. It may be called again after a restart, and after it was done.
	Run func(ctx context.Context, p *Progress) error
	// Undo takes back what Run did, or had begun to do. Optional.
	Undo func(ctx context.Context, p *Progress) error
	// Stays is what is said in place of Undo if the step is done: it stays as it is. "": it is undone.
	Stays string
}

// Planned completes a definition: arguments make a job, look refuses it or has warnings, and steps are all that it may
// have.
func Planned[J any](d Definition, ask func(Request) (J, error), look func(J, context.Context) ([]string, error), steps func(J) []Step) Definition {
	d.Plan = func(ctx context.Context, r Request) (p Plan, err error) {
		j, err := ask(r)
		if err == nil {
			p.Warnings, err = look(j, ctx)
		}
		return p, err
	}
	d.Steps = func(r Request) ([]Step, error) {
		j, err := ask(r)
		if err != nil {
			return nil, err
		}
		return steps(j), nil
	}
	return d
}

// Refusal is why something isn't done: it isn't possible, or not now.
type Refusal struct{ error }

// Unwrap gives access to the reason, for errors.Is.
func (r Refusal) Unwrap() error { return r.error }

func refuse(format string, args ...any) error { return Refusal{fmt.Errorf(format, args...)} }

// ErrNotFound: there is no operation with the ID.
var ErrNotFound = errors.New("no such operation")

// skipped is the error of a step that has nothing to do.
type skipped struct{ why string }

func (s skipped) Error() string { return s.why }

// Skip returns the error with which Run reports that the step isn't needed. The
// operation continues.
func Skip(format string, args ...any) error { return skipped{fmt.Sprintf(format, args...)} }

// Options are what the operations of a node stand on.
type Options struct {
	Store       *resource.Store
	Definitions []Definition
	Log         *slog.Logger
	// Print writes a line to the console; nil: nowhere.
	Print func(format string, args ...any)
	// Dir is where the journals are, on STATE.
	Dir string
	// Lock keeps disruptive operations of several nodes apart; nil: nothing does.
	Lock Lock
	// Shared is where the records of shared operations are; nil: there are none.
	Shared Shared

	writeFile func(path string, data []byte, mode os.FileMode) error // tests fill STATE up
}

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

func (d Definition) validate() error {
	if !nameForm.MatchString(d.Name) || d.Plan == nil || d.Steps == nil {
		return fmt.Errorf("operation %q: its name must be like %s, and it needs a plan and steps", d.Name, nameForm)
	}
	return nil
}

// kept are the steps that aren't left out.
func kept(steps []Step) []Step {
	return slices.DeleteFunc(steps, func(s Step) bool { return s.Omit })
}

// validateSteps finds what the program has done wrong; plans don't come from outside.
func validateSteps(steps []Step) error {
	if len(steps) == 0 || len(steps) > maxSteps {
		return fmt.Errorf("a plan has 1 to %d steps, and not %d", maxSteps, len(steps))
	}
	seen := map[string]bool{}
	for _, s := range steps {
		switch {
		case !nameForm.MatchString(s.ID) || seen[s.ID]:
			return fmt.Errorf("step %q: its ID must be unique, and like %s", s.ID, nameForm)
		case s.Run == nil || s.What == "" || s.Deadline <= 0:
			return fmt.Errorf("step %q needs a description, a deadline and something to run", s.ID)
		}
		seen[s.ID] = true
	}
	return nil
}

package operation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
)

// maxParts bounds the parts of a step: one for each node of a cluster, or for each image.
const maxParts = 128

// A Part is what a step does for one of several things of a kind, such as each node. It
// has its own state in the record: after a restart, parts that are done aren't run again.
type Part struct {
	ID   string // unique in the step: the node's name
	What string // upgrade the kubelet of n2
	// Deadline bounds Run, and Undo; 0: the step's own.
	Deadline time.Duration
	// Run does it. It may be called again after a restart.
	Run func(ctx context.Context, p *Progress) error
	// Undo takes back what Run did, or had begun to do. Optional.
	Undo func(ctx context.Context, p *Progress) error
}

// PartStatus is a part as it is shown and recorded.
type PartStatus struct {
	ID     string    `json:"id"`
	What   string    `json:"what"`
	State  State     `json:"state"`
	Reason string    `json:"reason,omitempty"` // of Skipped and Failed
	Text   string    `json:"text,omitempty"`   // the last line of its progress
	Began  time.Time `json:"began,omitzero"`
	Ended  time.Time `json:"ended,omitzero"`
}

// Each runs the parts, so many at once, in their order. After the first that fails none is
// begun any more; those that run come to their end. The error names all that failed.
func (p *Progress) Each(ctx context.Context, atOnce int, parts ...Part) error {
	if err := p.plan(parts); err != nil {
		return err
	}
	places := make(chan struct{}, max(atOnce, 1))
	var running sync.WaitGroup
	var failed atomic.Bool
	errs := make([]error, len(parts))
	for i, part := range parts {
		places <- struct{}{}
		if failed.Load() || ctx.Err() != nil {
			break
		}
		running.Go(func() {
			defer func() { <-places }()
			if err := p.runPart(ctx, part); err != nil {
				errs[i] = fmt.Errorf("%s: %w", part.ID, err)
				failed.Store(true)
			}
		})
	}
	running.Wait()
	return cmp.Or(errors.Join(errs...), context.Cause(ctx))
}

// plan puts the parts into the record. Those that are there stay as they are.
func (p *Progress) plan(parts []Part) error {
	if len(parts) > maxParts {
		return fmt.Errorf("step %s has %d parts, of at most %d", p.step, len(parts), maxParts)
	}
	for i, part := range parts {
		if part.ID == "" || len(part.ID) > maxPartID || part.Run == nil || slices.ContainsFunc(parts[:i], func(o Part) bool { return o.ID == part.ID }) {
			return fmt.Errorf("step %s: part %.80q needs a unique ID of at most %d bytes and something to run", p.step, part.ID, maxPartID)
		}
	}
	return p.x.commit(func(next *record) ([]Event, error) {
		s := next.step(p.step)
		for _, part := range parts {
			if s.part(part.ID) == nil {
				s.Parts = append(s.Parts, PartStatus{ID: part.ID, What: bounded(part.What), State: Pending})
			}
		}
		if len(s.Parts) > maxParts {
			return nil, fmt.Errorf("step %s has %d parts, of at most %d", p.step, len(s.Parts), maxParts)
		}
		return nil, nil
	}, nil)
}

// maxPartID is the longest name of a node (RFC 1123).
const maxPartID = 253

func (p *Progress) runPart(ctx context.Context, part Part) error {
	if s := p.x.record().step(p.step).part(part.ID); s.State == Done || s.State == Skipped {
		return nil
	}
	now := time.Now()
	if err := p.x.changePart(p.step, part.ID, func(s *PartStatus) { s.State, s.Reason, s.Began, s.Ended = Running, "", now, time.Time{} }); err != nil {
		return err
	}
	err := p.callPart(ctx, part, part.Run)
	if errors.Is(err, errAborted) || errors.Is(err, errStopped) || errors.Is(err, errLost) {
		return err // it goes on later, or is undone
	}
	var skip skipped
	state, reason := Done, ""
	switch {
	case errors.As(err, &skip):
		state, reason, err = Skipped, skip.why, nil
	case err != nil:
		state, reason = Failed, err.Error()
	}
	return errors.Join(err, p.x.changePart(p.step, part.ID, func(s *PartStatus) {
		s.State, s.Reason, s.Ended = state, bounded(reason), time.Now()
	}))
}

// callPart calls a function of a part within its deadline. A panic is an error.
func (p *Progress) callPart(ctx context.Context, part Part, run func(context.Context, *Progress) error) error {
	deadline := p.deadline
	if part.Deadline > 0 {
		deadline = newPausable(ctx, part.Deadline)
		defer deadline.end()
		ctx = deadline.ctx
	}
	err := dag.Guard(p.x.r.o.Log, func() error {
		return run(ctx, &Progress{x: p.x, step: p.step, part: part.ID, deadline: deadline})
	})
	return deadline.why(err)
}

// UndoEach undoes the parts that were begun, the last first. What can't be undone doesn't
// keep the others from being undone; the error names it.
func (p *Progress) UndoEach(ctx context.Context, parts ...Part) error {
	var failed []error
	for _, part := range slices.Backward(parts) {
		s := p.x.record().step(p.step).part(part.ID)
		if part.Undo == nil || s == nil || s.State == Pending || s.State == Undone || s.State == Skipped {
			continue
		}
		err := p.callPart(ctx, part, part.Undo)
		if errors.Is(err, errStopped) || errors.Is(err, errLost) {
			return err
		}
		state, reason := Undone, ""
		if err != nil {
			state, reason = Failed, "undo: "+err.Error()
			failed = append(failed, fmt.Errorf("%s: %w", part.ID, err))
		}
		if err := p.x.changePart(p.step, part.ID, func(s *PartStatus) { s.State, s.Reason, s.Ended = state, bounded(reason), time.Now() }); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// changePart changes a part in the record, and reports its state.
func (x *execution) changePart(step, part string, change func(*PartStatus)) error {
	return x.commit(func(next *record) ([]Event, error) {
		s := next.step(step).part(part)
		change(s)
		text := s.Reason
		if s.State == Running {
			text = s.What
		}
		return []Event{{Kind: Changed, Step: step, Part: part, State: s.State, Text: text}}, nil
	}, nil)
}

// partStates are those of a part.
var partStates = []State{Pending, Running, Done, Skipped, Failed, Undone}

func (s *Status) validateParts() error {
	if len(s.Parts) > maxParts {
		return fmt.Errorf("step %s has %d parts", s.ID, len(s.Parts))
	}
	for i, part := range s.Parts {
		if part.ID == "" || len(part.ID) > maxPartID || !slices.Contains(partStates, part.State) || s.part(part.ID) != &s.Parts[i] {
			return fmt.Errorf("step %s: part %.80q in state %.80q", s.ID, part.ID, part.State)
		}
	}
	return nil
}

// step is the status with an ID; a step of the plan always has one.
func (r *record) step(id string) *Status {
	for i := range r.Steps {
		if r.Steps[i].ID == id {
			return &r.Steps[i]
		}
	}
	return &Status{}
}

// part is nil for one that isn't there.
func (s *Status) part(id string) *PartStatus {
	for i := range s.Parts {
		if s.Parts[i].ID == id {
			return &s.Parts[i]
		}
	}
	return nil
}

package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// stepGrace is how long a step may take to end after its context has ended. After that,
	// the operation continues without it.
	stepGrace = 3 * time.Second
	// releaseTimeout bounds giving the lock back; it ends by itself else. With
	// stepGrace it is less than stopBudget.
	releaseTimeout = 2 * time.Second
	// restartHold is how long the lock of an operation stays that a restart of the node,
	// or a loss of its power, has cut short: a server with much memory tests it for minutes.
	restartHold = 15 * time.Minute
	// sharedHold is for an operation that another node can take over when this one is lost.
	sharedHold = time.Minute
)

// lockStays is how long the lock of an operation stays if its node is lost.
func (d Definition) lockStays() time.Duration {
	if d.Shared {
		return sharedHold
	}
	return restartHold
}

// Reasons why the context of a step ends.
var (
	errAborted  = errors.New("aborted")
	errDeadline = errors.New("not done in time")
	errStopped  = errors.New("the node stops")
)

// run brings an operation to its end. It returns early when the node stops.
func (x *execution) run(ctx context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	x.mu.Lock()
	x.cancel = cancel
	rec := x.rec
	x.mu.Unlock()
	before := !rec.Unlocked && rec.Boots > 1 && x.r.o.Lock != nil // an earlier boot has taken the lock
	h := Holder{Name: rec.Name, ID: x.id, Since: rec.Began, Stays: x.def.lockStays()}
	if before {
		x.lock = x.r.retake(ctx, h, func(text string) { x.report("", "", text) })
	}
	if x.def.Shared && x.claimed() == nil && !x.coordinate(ctx) {
		x.dropClaim()
		if x.record().Finished() { // another node has it, or has ended it
			x.release(0)
		} else {
			x.release(restartHold)
		}
		return
	}
	rec = x.record()
	if rec.State == Running && rec.Boots > 1 && x.unwritten && !x.back(rec) {
		// What ends the node would do so at each boot, with nothing to count how often.
		x.force(func(next *record) ([]Event, error) {
			next.Error = "after a restart, its journal can't be written"
			return x.conclude(next, Failed), nil
		})
	} else if rec.State == Running {
		for errors.Is(x.forward(ctx), errLost) && x.coordinate(ctx) {
		}
	}
	if x.record().State == Undoing {
		// Undoing isn't aborted.
		x.backward(x.r.ctx)
	}
	x.dropClaim()
	if !x.record().Finished() {
		x.release(restartHold)
		return
	}
	if x.def.Shared {
		if err := x.r.prune(x.r.ctx); err != nil {
			x.r.o.Log.Warn("remove the records of former operations from etcd", "err", err)
		}
	}
	if before && x.lock == nil { // aborted too early to have it again: nobody is to wait for this node
		tctx, stop := context.WithTimeout(x.r.ctx, lockReclaim)
		x.lock = x.r.retake(tctx, h, func(string) {})
		stop()
	}
	x.release(0)
}

// over reports whether no part of it runs any more.
func (x *execution) over() bool { return sleep.Closed(x.ended) }

// release gives the lock back, if it has one.
func (x *execution) release(after time.Duration) {
	if x.lock == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := x.lock.Release(ctx, after); err != nil {
		x.r.o.Log.Warn("the lock of the cluster ends by itself only", "operation", x.id, "err", err)
	}
	x.lock = nil
}

// settle waits for operations that are known to be done, and that still give the lock of the
// cluster back: who has seen their end can begin the next one.
func (r *Runner) settle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*releaseTimeout)
	defer cancel()
	for _, x := range r.all() {
		if !x.record().Finished() {
			continue
		}
		select {
		case <-x.ended:
		case <-ctx.Done():
			return
		}
	}
}

// forward runs the steps, from the first one that isn't done. It returns errLost where this
// node may not be the coordinator of the operation any more.
func (x *execution) forward(ctx context.Context) error {
	steps := x.record().Steps
	for i, s := range steps {
		if s.State == Done || s.State == Skipped {
			continue
		}
		step, known := x.steps[s.ID]
		if !known {
			x.fail(i, fmt.Errorf("this release knows no step %q", s.ID))
			return nil
		}
		if err := x.step(ctx, i, step); errors.Is(err, errLost) {
			return errLost
		} else if err != nil {
			if !errors.Is(err, errAborted) && !errors.Is(err, errStopped) {
				x.fail(i, err)
			}
			return nil
		}
	}
	if !x.record().Finished() {
		x.end(Done, "")
	}
	return nil
}

func (x *execution) claimed() Claim {
	x.turn.Lock()
	defer x.turn.Unlock()
	return x.claim
}

// step runs one step, and writes down before that it begins and after it how it
// went.
func (x *execution) step(ctx context.Context, i int, step Step) error {
	if step.EndsNode {
		x.ending.Store(true)
	}
	if err := x.commit(func(next *record) ([]Event, error) { return x.beginStep(next, i, step) }, nil); err != nil {
		return err
	}
	if s := x.record().Steps[i]; s.State == Skipped { // it has had its attempts
		return nil
	}
	if step.EndsNode {
		return x.endNode(ctx, i, step)
	}
	err := x.attempt(ctx, step, step.Run)
	var skip skipped
	state, reason := Done, ""
	switch {
	case err == nil:
	case errors.Is(err, errAborted), errors.Is(err, errStopped), errors.Is(err, errLost):
		return err
	case errors.As(err, &skip):
		state, reason = Skipped, skip.why
	case step.Optional:
		state, reason = Skipped, err.Error()
	default:
		return err
	}
	return x.commit(func(next *record) ([]Event, error) {
		if next.State != Running {
			return nil, errAborted
		}
		next.Wiped = next.Wiped || step.WipesJournal && state == Done
		return []Event{next.Steps[i].becomes(state, reason)}, nil
	}, nil)
}

func (x *execution) beginStep(next *record, i int, step Step) ([]Event, error) {
	s := &next.Steps[i]
	if next.State != Running {
		return nil, errAborted
	}
	if s.Attempts >= maxAttempts {
		reason := fmt.Sprintf("the node has ended %d times while it ran", s.Attempts)
		if !s.Optional {
			return nil, errors.New(reason)
		}
		return []Event{s.becomes(Skipped, reason)}, nil
	}
	s.State, s.Began = Running, time.Now()
	s.Attempts++
	events := []Event{{Kind: Changed, Step: s.ID, State: Running, Text: s.What}}
	if !step.EndsNode {
		return events, nil
	}
	s.State, s.Ended = Done, time.Now()
	if i == len(next.Steps)-1 {
		next.State, next.Ended = Done, time.Now()
		events = append(events, Event{Kind: Changed, State: Done})
	}
	return events, nil
}

// endNode runs a step that counts as done already, and waits for the node to end.
func (x *execution) endNode(ctx context.Context, i int, step Step) error {
	x.drainWatchers(ctx)
	x.release(step.Hold)
	if err := x.attempt(ctx, step, step.Run); err != nil {
		return err
	}
	if !sleep.For(ctx, step.Deadline) {
		return errStopped
	}
	return fmt.Errorf("the node hasn't ended within %s", step.Deadline)
}

// fail ends an operation because of a step: what was done is undone if it can be.
func (x *execution) fail(i int, err error) {
	x.force(func(next *record) ([]Event, error) {
		s := &next.Steps[i]
		next.Error = bounded(s.ID + ": " + err.Error())
		failed := s.becomes(Failed, err.Error())
		return append([]Event{failed}, x.conclude(next, Failed)...), nil
	})
}

// conclude ends an operation: by undoing, if there are steps to undo and this is
// possible. A step that runs and isn't undone has failed, because no later event has its
// result.
func (x *execution) conclude(next *record, verdict State) (events []Event) {
	for i := range next.Steps {
		if s := &next.Steps[i]; s.State == Running && !(next.returnable() && x.undoable(*s)) {
			events = append(events, s.becomes(Failed, next.Error))
		}
	}
	if next.returnable() && slices.ContainsFunc(next.Steps, x.undoable) {
		next.State, next.Verdict, next.Ended = Undoing, verdict, time.Time{}
	} else {
		next.State, next.Ended = verdict, time.Now()
	}
	return append(events, Event{Kind: Changed, State: next.State, Text: next.Error})
}

// undoable reports whether a step has something to undo. A step whose undoing failed isn't
// undone again after a restart: a later step may be half undone.
func (x *execution) undoable(s Status) bool {
	tried := s.State == Undone || s.State == Failed && s.UndoAttempts > 0
	return s.Attempts > 0 && !tried && x.steps[s.ID].Undo != nil
}

// abort turns an operation round.
func (x *execution) abort(by string) error {
	return x.commit(func(next *record) ([]Event, error) {
		switch {
		case next.Finished():
			return nil, refuse("abort %s: it has ended already: %s", x.id, next.State)
		case next.State == Undoing:
			return nil, refuse("abort %s: what it did is being undone already", x.id)
		case !next.returnable() && !x.back(next):
			at := slices.IndexFunc(next.Steps, func(s Status) bool { return s.PointOfNoReturn })
			return nil, refuse("abort %s: step %s has begun, and can't be undone: the operation must come to its end", x.id, next.Steps[at].ID)
		}
		next.Error = bounded("aborted by " + by)
		return x.conclude(next, Aborted), nil
	}, func() { x.cancel(errAborted) })
}

// back reports whether the node was ended and has started again, and no remaining step is
// required: other operations needn't wait for this one.
func (x *execution) back(r *record) bool {
	if x.ending.Load() {
		return false
	}
	ended := slices.ContainsFunc(r.Steps, func(s Status) bool { return s.State == Done && x.steps[s.ID].EndsNode })
	return ended && !slices.ContainsFunc(r.Steps, func(s Status) bool { return (s.State == Pending || s.State == Running) && !s.Optional })
}

// end is the end without more ado.
func (x *execution) end(state State, why string) {
	x.force(func(next *record) ([]Event, error) {
		next.State, next.Ended = state, time.Now()
		if why != "" {
			next.Error = bounded(strings.TrimPrefix(next.Error+"; "+why, "; "))
		}
		return []Event{{Kind: Changed, State: state, Text: next.Error}}, nil
	})
}

// backward undoes the steps in reverse order. It reports a failure, and continues with
// the other steps.
func (x *execution) backward(ctx context.Context) {
	steps := x.record().Steps
	for i, s := range slices.Backward(steps) {
		if !x.undoable(s) {
			continue
		}
		if stays := x.steps[s.ID].Stays; stays != "" && s.State == Done {
			x.force(func(next *record) ([]Event, error) {
				next.Steps[i].State, next.Steps[i].Ended = Undone, time.Now()
				return []Event{{Kind: Changed, Step: s.ID, State: Undoing}, {Kind: Said, Step: s.ID, Text: stays}, {Kind: Changed, Step: s.ID, State: Undone}}, nil
			})
			continue
		}
		x.force(func(next *record) ([]Event, error) {
			s := &next.Steps[i]
			s.State = Undoing
			s.UndoAttempts++
			return []Event{{Kind: Changed, Step: s.ID, State: Undoing}}, nil
		})
		step := x.steps[s.ID]
		err := fmt.Errorf("the node has ended %d times while it was undone", s.UndoAttempts)
		if s.UndoAttempts < maxAttempts {
			err = x.attempt(ctx, step, step.Undo)
		}
		if errors.Is(err, errStopped) {
			return
		}
		if errors.Is(err, errLost) {
			if x.coordinate(ctx) {
				x.backward(ctx) // from the record, which another node may have changed
			}
			return
		}
		x.force(func(next *record) ([]Event, error) {
			s := &next.Steps[i]
			if err != nil {
				next.Error = bounded(fmt.Sprintf("%s; %s isn't undone: %v", next.Error, s.ID, err))
				return []Event{s.becomes(Failed, "undo: "+err.Error())}, nil
			}
			s.State, s.Ended = Undone, time.Now()
			return []Event{{Kind: Changed, Step: s.ID, State: Undone}}, nil
		})
	}
	x.end(x.record().Verdict, "")
}

// attempt calls a function of a step within its deadline. The error wraps the reason why
// the context ended: errAborted, errDeadline, errStopped.
func (x *execution) attempt(ctx context.Context, step Step, run func(context.Context, *Progress) error) error {
	p := newPausable(ctx, step.Deadline)
	defer p.end()
	if x.def.Shared {
		claim := x.claimed()
		if claim == nil {
			return errLost
		}
		x.r.running.Go(func() {
			select {
			case <-claim.Lost():
				p.cancel(errLost)
			case <-p.ctx.Done():
			}
		})
	}
	done := make(chan error, 1)
	x.r.running.Go(func() {
		done <- dag.Guard(x.r.o.Log, func() error { return run(p.ctx, &Progress{x: x, step: step.ID, deadline: p}) })
	})
	select {
	case err := <-done:
		return p.why(err)
	case <-p.ctx.Done():
	}
	select {
	case err := <-done:
		return p.why(err)
	case <-time.After(stepGrace):
		return p.why(fmt.Errorf("step %s doesn't end when it is told to: it is left to itself", step.ID))
	}
}

// pausable is a context whose deadline doesn't advance during a question.
type pausable struct {
	ctx      context.Context
	cancel   context.CancelCauseFunc
	deadline time.Duration

	mu    sync.Mutex // guards what follows
	left  time.Duration
	since time.Time
	timer *time.Timer
}

func newPausable(parent context.Context, deadline time.Duration) *pausable {
	p := &pausable{deadline: deadline, left: deadline, since: time.Now()}
	p.ctx, p.cancel = context.WithCancelCause(parent)
	p.timer = time.AfterFunc(deadline, func() { p.cancel(errDeadline) })
	return p
}

// pause stops the clock until the returned function is called.
func (p *pausable) pause() (resume func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer.Stop() {
		p.left -= time.Since(p.since)
	} else {
		p.left = 0
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.since = time.Now()
		p.timer.Reset(max(p.left, 0))
	}
}

func (p *pausable) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer.Stop()
	p.cancel(nil)
}

// why adds the reason why the context ended to the error of a step.
func (p *pausable) why(err error) error {
	if err == nil {
		return nil
	}
	if p.ctx.Err() == nil {
		return err
	}
	switch cause := context.Cause(p.ctx); {
	case errors.Is(cause, errDeadline):
		return fmt.Errorf("not done within %s: %w", p.deadline, err)
	case errors.Is(cause, errAborted):
		return errAborted
	case errors.Is(cause, errLost):
		return errLost
	default:
		return errStopped
	}
}

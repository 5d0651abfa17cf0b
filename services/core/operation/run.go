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
)

const (
	// stepGrace is what a step gets to end once it is told to. One that doesn't is
	// left to itself.
	stepGrace = 3 * time.Second
	// releaseTimeout bounds giving the lock back; it ends by itself else. With
	// stepGrace it is less than stopBudget.
	releaseTimeout = 2 * time.Second
	// restartHold is how long the lock of an operation stays that the node's restart
	// has cut short: a server with much memory tests it for minutes.
	restartHold = 15 * time.Minute
)

// Why a step is told to end.
var (
	errAborted  = errors.New("aborted")
	errDeadline = errors.New("not done in time")
	errStopped  = errors.New("the node stops")
)

// run brings an operation to its end. It returns early when the node stops.
func (l *live) run(ctx context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l.mu.Lock()
	l.cancel = cancel
	rec := l.rec
	l.mu.Unlock()
	before := !rec.Unlocked && rec.Boots > 1 // an earlier boot has taken the lock
	h := Holder{Name: rec.Name, ID: l.id, Since: rec.Began}
	if before {
		l.lock = l.r.retake(ctx, h, func(text string) { l.say("", text) })
	}
	if rec.State == Running && rec.Boots > 1 && l.unwritten {
		// What ends the node would do so at each boot, with nothing to count how often.
		l.force(func(next *record) ([]Event, error) {
			next.Error = "after a restart, its journal can't be written"
			return l.conclude(next, Failed), nil
		})
	} else if rec.State == Running {
		l.forward(ctx)
	}
	if l.record().State == Undoing {
		// Undoing isn't aborted.
		l.backward(l.r.ctx)
	}
	if !l.record().Finished() {
		l.release(restartHold)
		return
	}
	if before && l.lock == nil { // aborted too early to have it again: nobody is to wait for this node
		tctx, stop := context.WithTimeout(l.r.ctx, lockReclaim)
		l.lock = l.r.retake(tctx, h, func(string) {})
		stop()
	}
	l.release(0)
}

// over tells whether nothing of it runs any more.
func (l *live) over() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// release gives the lock back, if it has one.
func (l *live) release(after time.Duration) {
	if l.lock == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := l.lock.Release(ctx, after); err != nil {
		l.r.o.Log.Warn("the lock of the cluster ends by itself only", "operation", l.id, "err", err)
	}
	l.lock = nil
}

// forward runs the steps, from the first one that isn't done.
func (l *live) forward(ctx context.Context) {
	steps := l.record().Steps
	for i, s := range steps {
		if s.State == Done || s.State == Skipped {
			continue
		}
		step, known := l.steps[s.ID]
		if !known {
			l.fail(i, fmt.Errorf("this release knows no step %q", s.ID))
			return
		}
		if err := l.step(ctx, i, step); err != nil {
			if !errors.Is(err, errAborted) && !errors.Is(err, errStopped) {
				l.fail(i, err)
			}
			return
		}
	}
	if !l.record().Finished() {
		l.end(Done, "")
	}
}

// step runs one step, and writes down before that it begins and after it how it
// went.
func (l *live) step(ctx context.Context, i int, step Step) error {
	if step.EndsNode {
		l.ending.Store(true)
	}
	if err := l.commit(func(next *record) ([]Event, error) { return l.beginStep(next, i, step) }, nil); err != nil {
		return err
	}
	if s := l.record().Steps[i]; s.State == Skipped { // it has had its attempts
		return nil
	}
	if step.EndsNode {
		return l.endNode(ctx, i, step)
	}
	err := l.attempt(ctx, step, step.Run)
	var skip skipped
	state, reason := Done, ""
	switch {
	case err == nil:
	case errors.Is(err, errAborted), errors.Is(err, errStopped):
		return err
	case errors.As(err, &skip):
		state, reason = Skipped, skip.why
	case step.Optional:
		state, reason = Skipped, err.Error()
	default:
		return err
	}
	return l.commit(func(next *record) ([]Event, error) {
		if next.State != Running {
			return nil, errAborted
		}
		s := &next.Steps[i]
		s.State, s.Reason, s.Ended = state, bounded(reason), time.Now()
		next.Wiped = next.Wiped || step.WipesJournal && state == Done
		return []Event{{Kind: Changed, Step: s.ID, State: state, Text: reason}}, nil
	}, nil)
}

func (l *live) beginStep(next *record, i int, step Step) ([]Event, error) {
	s := &next.Steps[i]
	if next.State != Running {
		return nil, errAborted
	}
	if s.Attempts >= maxAttempts {
		reason := fmt.Sprintf("the node has ended %d times while it ran", s.Attempts)
		if !s.Optional {
			return nil, errors.New(reason)
		}
		s.State, s.Reason, s.Ended = Skipped, reason, time.Now()
		return []Event{{Kind: Changed, Step: s.ID, State: Skipped, Text: reason}}, nil
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
func (l *live) endNode(ctx context.Context, i int, step Step) error {
	l.farewell(ctx)
	l.release(step.Hold)
	err := l.attempt(ctx, step, step.Run)
	if err == nil {
		select {
		case <-ctx.Done():
			return errStopped
		case <-time.After(step.Deadline):
			err = fmt.Errorf("the node hasn't ended within %s", step.Deadline)
		}
	}
	return err
}

// fail ends an operation because of a step: what was done is undone if it can be.
func (l *live) fail(i int, err error) {
	l.force(func(next *record) ([]Event, error) {
		s := &next.Steps[i]
		s.State, s.Reason, s.Ended = Failed, bounded(err.Error()), time.Now()
		next.Error = bounded(s.ID + ": " + err.Error())
		events := []Event{{Kind: Changed, Step: s.ID, State: Failed, Text: err.Error()}}
		return append(events, l.conclude(next, Failed)...), nil
	})
}

// conclude turns an operation to its end: over undoing where there is something to
// undo, and where that is possible. A step that runs and isn't undone has failed:
// nobody says later how it went.
func (l *live) conclude(next *record, verdict State) []Event {
	var events []Event
	for i := range next.Steps {
		if s := &next.Steps[i]; s.State == Running && !(next.returnable() && l.undoable(*s)) {
			s.State, s.Reason, s.Ended = Failed, next.Error, time.Now()
			events = append(events, Event{Kind: Changed, Step: s.ID, State: Failed, Text: s.Reason})
		}
	}
	if next.returnable() && slices.ContainsFunc(next.Steps, l.undoable) {
		next.State, next.Verdict, next.Ended = Undoing, verdict, time.Time{}
	} else {
		next.State, next.Ended = verdict, time.Now()
	}
	return append(events, Event{Kind: Changed, State: next.State, Text: next.Error})
}

// undoable tells whether something of a step is to be undone.
func (l *live) undoable(s Status) bool {
	return s.Attempts > 0 && s.State != Undone && l.steps[s.ID].Undo != nil
}

// abort turns an operation round.
func (l *live) abort(by string) error {
	return l.commit(func(next *record) ([]Event, error) {
		switch {
		case next.Finished():
			return nil, refuse("abort %s: it has ended already: %s", l.id, next.State)
		case next.State == Undoing:
			return nil, refuse("abort %s: what it did is being undone already", l.id)
		case !next.returnable() && !l.back(next):
			at := slices.IndexFunc(next.Steps, func(s Status) bool { return s.PointOfNoReturn })
			return nil, refuse("abort %s: step %s has begun, and can't be undone: the operation must come to its end", l.id, next.Steps[at].ID)
		}
		next.Error = bounded("aborted by " + by)
		return l.conclude(next, Aborted), nil
	}, func() { l.cancel(errAborted) })
}

// back tells whether the node was ended, has started again, and nothing of what is left
// must be done: whoever wants something else of the node needn't wait for it.
func (l *live) back(r *record) bool {
	if l.ending.Load() {
		return false
	}
	ended := slices.ContainsFunc(r.Steps, func(s Status) bool { return s.State == Done && l.steps[s.ID].EndsNode })
	return ended && !slices.ContainsFunc(r.Steps, func(s Status) bool { return (s.State == Pending || s.State == Running) && !s.Optional })
}

// end is the end without more ado.
func (l *live) end(state State, why string) {
	l.force(func(next *record) ([]Event, error) {
		next.State, next.Ended = state, time.Now()
		if why != "" {
			next.Error = bounded(strings.TrimPrefix(next.Error+"; "+why, "; "))
		}
		return []Event{{Kind: Changed, State: state, Text: next.Error}}, nil
	})
}

// backward undoes what was done, the last first. What can't be undone is said, and
// keeps nothing else from being undone.
func (l *live) backward(ctx context.Context) {
	steps := l.record().Steps
	for i, s := range slices.Backward(steps) {
		if !l.undoable(s) {
			continue
		}
		l.force(func(next *record) ([]Event, error) {
			s := &next.Steps[i]
			s.State = Undoing
			s.UndoAttempts++
			return []Event{{Kind: Changed, Step: s.ID, State: Undoing}}, nil
		})
		step := l.steps[s.ID]
		err := fmt.Errorf("the node has ended %d times while it was undone", s.UndoAttempts)
		if s.UndoAttempts < maxAttempts {
			err = l.attempt(ctx, step, step.Undo)
		}
		if errors.Is(err, errStopped) {
			return
		}
		l.force(func(next *record) ([]Event, error) {
			s := &next.Steps[i]
			s.State, s.Ended = Undone, time.Now()
			if err == nil {
				return []Event{{Kind: Changed, Step: s.ID, State: Undone}}, nil
			}
			s.State, s.Reason = Failed, bounded("undo: "+err.Error())
			next.Error = bounded(fmt.Sprintf("%s; %s isn't undone: %v", next.Error, s.ID, err))
			return []Event{{Kind: Changed, Step: s.ID, State: Failed, Text: s.Reason}}, nil
		})
	}
	l.end(l.record().Verdict, "")
}

// attempt calls a function of a step within its deadline. The error wraps the reason
// where it was told to end: errAborted, errDeadline, errStopped.
func (l *live) attempt(ctx context.Context, step Step, run func(context.Context, *Progress) error) error {
	p := newPatient(ctx, step.Deadline)
	defer p.end()
	done := make(chan error, 1)
	l.r.running.Go(func() {
		done <- dag.Guard(l.r.o.Log, func() error { return run(p.ctx, &Progress{l: l, step: step.ID, patient: p}) })
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

// patient is a context whose deadline stands still while a person is asked.
type patient struct {
	ctx      context.Context
	cancel   context.CancelCauseFunc
	deadline time.Duration

	mu    sync.Mutex // guards what follows
	left  time.Duration
	since time.Time
	timer *time.Timer
}

func newPatient(parent context.Context, deadline time.Duration) *patient {
	p := &patient{deadline: deadline, left: deadline, since: time.Now()}
	p.ctx, p.cancel = context.WithCancelCause(parent)
	p.timer = time.AfterFunc(deadline, func() { p.cancel(errDeadline) })
	return p
}

// pause stops the clock until the returned function is called.
func (p *patient) pause() (resume func()) {
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

func (p *patient) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer.Stop()
	p.cancel(nil)
}

// why adds to the error of a step why it was told to end.
func (p *patient) why(err error) error {
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
	default:
		return errStopped
	}
}

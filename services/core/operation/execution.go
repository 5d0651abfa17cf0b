package operation

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// execution is an operation of this process: it runs, or it has ended.
type execution struct {
	r    *Runner
	id   string
	role string
	def  Definition
	// steps are those of the plan; none of an operation that has ended.
	steps map[string]Step
	lock  Taken
	// ending: a step of this boot ends the node.
	ending atomic.Bool
	// ended is closed when nothing of it runs any more.
	ended chan struct{}

	// turn is held during a change of the record. So the journal and the memory have
	// the same order of changes.
	turn sync.Mutex
	// unwritten: the failure to write the journal was reported. turn guards it; no other
	// goroutine has the execution before the operation runs.
	unwritten bool
	// silent: STATE doesn't answer. turn guards it.
	silent bool
	// claim is that this node is the coordinator of a shared operation; nil: it isn't.
	// turn guards it.
	claim Claim

	// mu guards all following fields. Nothing blocks while it is held.
	mu sync.Mutex
	// rec is the content of the journal. It is replaced, never changed.
	rec     *record
	history history
	asked   *asked
	// cancel ends the step that runs.
	cancel context.CancelCauseFunc
}

func newExecution(r *Runner, rec *record) *execution {
	def := r.definitions[rec.Name]
	return &execution{
		r: r, id: rec.ID, def: def, role: def.Role, rec: rec, ended: make(chan struct{}),
		history: newHistory(rec.Events, rec.Boots), cancel: func(error) {},
	}
}

// status is a copy for others; the caller holds mu.
func (x *execution) status() Operation {
	o := x.rec.clone().Operation
	o.Role = x.role
	if x.asked != nil {
		o.Question = new(x.asked.Asked)
	}
	return o
}

func (x *execution) record() *record {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.rec
}

// tell adds events to the history, to the log and to the console; the caller holds
// mu.
func (x *execution) tell(events ...Event) {
	for _, e := range events {
		x.r.print(x.id, e)
	}
	x.history.add(events...)
	renew(&x.history.changed)
}

// stamped are events as they are kept.
func stamped(events []Event) []Event {
	for i := range events {
		events[i].Time, events[i].Text = time.Now(), bounded(events[i].Text)
	}
	return events
}

// report adds an event that changes no state; the next change writes it to the journal.
func (x *execution) report(step, part, text string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if part != "" { // a record that was published is never changed
		x.rec = x.rec.clone()
		if s := x.rec.step(step).part(part); s != nil {
			s.Text = bounded(text)
		}
	}
	x.tell(stamped([]Event{{Kind: Said, Step: step, Part: part, Text: text}})...)
}

// change makes the next record out of the current one, and returns the events of the
// change. After an error nothing has changed.
type change func(next *record) ([]Event, error)

// commit changes the operation: first in the journal, then in memory. After a success,
// then runs with mu held. Past the point of no return the operation continues, also if
// the journal can't be written.
func (x *execution) commit(c change, then func()) error {
	x.turn.Lock()
	defer x.turn.Unlock()
	return x.apply(c, then, x.def.WithoutJournal || !x.record().returnable(), x.def.Shared)
}

// force is commit for what is so, whether it can be written down or not. The record of a
// shared operation must be written: it is tried until that works, or the operation isn't
// this node's any more.
func (x *execution) force(c change) {
	for {
		x.turn.Lock()
		err := x.apply(c, nil, true, x.def.Shared) // c alone could fail, and doesn't
		x.turn.Unlock()
		if !errors.Is(err, errLost) || !x.coordinate(x.r.ctx) {
			return
		}
	}
}

// apply writes the next record to etcd, if it is shared, and then here; the caller holds turn.
func (x *execution) apply(c change, then func(), anyway, shared bool) error {
	next := x.record().clone()
	next.Seq++
	events, err := c(next)
	events = stamped(events)
	if err == nil && shared {
		err = x.share(next, events)
	}
	if err != nil {
		return err
	}
	if err := x.write(next, events); err != nil {
		if !anyway {
			return fmt.Errorf("operation %s: %w", x.id, err)
		}
		if !x.unwritten {
			x.unwritten = true
			if !x.silent { // The last one has less than was done: the next boot would do it again.
				x.r.files.remove(x.id + journalSuffix)
			}
			events = append(events, stamped([]Event{{Kind: Said, Text: fmt.Sprintf("goes on without a journal, so that nobody knows of it after a restart: %v", err)}})...)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.rec = next
	if then != nil {
		then()
	}
	x.tell(events...)
	x.publish()
	return nil
}

// journalTimeout is for the journal of an operation that goes on without one.
const journalTimeout = 20 * time.Second

var errSilent = fmt.Errorf("STATE, where its journal is to be, doesn't answer within %s", journalTimeout)

// errNoState is why no journal is written yet.
var errNoState = errors.New("STATE, where its journal is to be, isn't mounted")

// write writes the journal as it will be.
func (x *execution) write(next *record, events []Event) error {
	if next.Wiped {
		return nil
	}
	if !x.r.opened.Load() {
		return errNoState
	}
	next.Events = x.eventsOf(events)
	if x.def.WithoutJournal {
		return x.writeInTime(next)
	}
	return x.r.files.write(next)
}

// writeInTime is for operations that repair a node. A disk that doesn't answer may block a write, whose goroutine
// nobody can end, and what is written too late is removed.
func (x *execution) writeInTime(next *record) error {
	if x.silent {
		return errSilent
	}
	var over atomic.Bool
	done := make(chan error, 1)
	go func() {
		err := x.r.files.write(next)
		if done <- err; !over.CompareAndSwap(false, true) {
			x.r.files.remove(x.id + journalSuffix)
		}
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(journalTimeout):
		if x.silent = over.CompareAndSwap(false, true); !x.silent {
			return <-done
		}
		return errSilent
	}
}

// eventsOf are the events as they will be with these.
func (x *execution) eventsOf(events []Event) []Event {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.history.with(events...)
}

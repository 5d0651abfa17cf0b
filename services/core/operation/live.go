package operation

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// live is an operation that this program knows: it runs, or has ended.
type live struct {
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

	// turn is held by whoever changes the record: what is in the journal, and what is
	// in memory, have one order.
	turn sync.Mutex
	// unwritten: it was told that the journal can't be written. turn guards it; nobody
	// else has it before the operation runs.
	unwritten bool

	// mu guards all following fields. Nothing blocks while it is held.
	mu sync.Mutex
	// rec is what the journal says. It is replaced, never changed.
	rec   *record
	story story
	asked *asked
	// cancel ends the step that runs.
	cancel context.CancelCauseFunc
}

func newLive(r *Runner, rec *record) *live {
	def := r.definitions[rec.Name]
	return &live{
		r: r, id: rec.ID, def: def, role: def.Role, rec: rec, ended: make(chan struct{}),
		story: newStory(rec.Events, rec.Boots), cancel: func(error) {},
	}
}

// status is a copy for others; the caller holds mu.
func (l *live) status() Operation {
	o := l.rec.clone().Operation
	o.Role = l.role
	if l.asked != nil {
		q := l.asked.Asked
		o.Question = &q
	}
	return o
}

func (l *live) record() *record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rec
}

// tell adds events to the story, to the log and to the console; the caller holds
// mu.
func (l *live) tell(events ...Event) {
	for _, e := range events {
		l.r.say(l.id, e)
	}
	l.story.add(events...)
	renew(&l.story.changed)
}

// stamped are events as they are kept.
func stamped(events []Event) []Event {
	for i := range events {
		events[i].Time, events[i].Text = time.Now(), bounded(events[i].Text)
	}
	return events
}

// say is for what changes nothing; it gets into the journal with the next change.
func (l *live) say(step, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tell(stamped([]Event{{Kind: Said, Step: step, Text: text}})...)
}

// change makes the next record of the current one, and says what is to be told of
// it. An error leaves all as it is.
type change func(next *record) ([]Event, error)

// commit changes the operation: first in the journal, then for everybody. If all
// went well, then runs with mu held. Past the point of no return the only way is on,
// also where that can't be written down.
func (l *live) commit(c change, then func()) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	return l.apply(c, then, l.def.WithoutJournal || !l.record().returnable())
}

// force is commit for what is so, whether it can be written down or not.
func (l *live) force(c change) {
	l.turn.Lock()
	defer l.turn.Unlock()
	_ = l.apply(c, nil, true) // c alone could fail, and doesn't
}

func (l *live) apply(c change, then func(), anyway bool) error {
	next := l.record().clone()
	events, err := c(next)
	if err != nil {
		return err
	}
	events = stamped(events)
	if err := l.write(next, events); err != nil {
		if !anyway {
			return fmt.Errorf("operation %s: %w", l.id, err)
		}
		if !l.unwritten {
			l.unwritten = true
			// The last one tells less than was done: the next boot would do it again.
			l.r.files.remove(l.id + journalSuffix)
			events = append(events, stamped([]Event{{Kind: Said, Text: fmt.Sprintf("goes on without a journal, so that nobody knows of it after a restart: %v", err)}})...)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rec = next
	if then != nil {
		then()
	}
	l.tell(events...)
	l.publish()
	return nil
}

// errNoState is why no journal is written yet.
var errNoState = errors.New("STATE, where its journal is to be, isn't mounted")

// write writes the journal as it will be.
func (l *live) write(next *record, events []Event) error {
	if next.Wiped {
		return nil
	}
	if !l.r.journalled() {
		return errNoState
	}
	l.mu.Lock()
	next.Events = l.story.with(events...)
	l.mu.Unlock()
	return l.r.files.write(next)
}

package operation

import (
	"context"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// maxEvents bounds the history of an operation. A drain of a full node needs half of it:
	// one event for each pod.
	maxEvents = 500
	// watcherBudget is how long watchers may take to receive the last event before the node
	// ends, and transportBudget how long apid needs to pass it on.
	watcherBudget   = 2 * time.Second
	transportBudget = 250 * time.Millisecond

	// A cursor has the boot in its upper bits, and the event in its lower ones: events after
	// the last write of the journal are lost in a crash, and their cursors must not be used again.
	bootShift = 32
	maxBoots  = 1 << 30
)

// EventKind is the kind of an event.
type EventKind string

const (
	Said     EventKind = "said"     // by a step, or without one by the operation
	Changed  EventKind = "changed"  // the state of a step, or without one of the operation
	Asks     EventKind = "asks"     // the operation waits for an answer
	Answered EventKind = "answered" // it has one
)

// Event is a line of an operation's history.
type Event struct {
	// Cursor grows from event to event.
	Cursor uint64    `json:"cursor"`
	Time   time.Time `json:"time"`
	Kind   EventKind `json:"kind"`
	Step   string    `json:"step,omitempty"`
	Part   string    `json:"part,omitempty"`  // of the step
	State  State     `json:"state,omitempty"` // with Changed
	Text   string    `json:"text,omitempty"`
}

// Update is what a watcher gets: how the operation stands, and what happened since
// the last one.
type Update struct {
	Operation Operation
	Events    []Event
	// Lost: events between the last update and this one aren't kept any more.
	Lost bool
}

// history has the events of an operation, and its watchers.
type history struct {
	events  []Event
	cursor  uint64 // of the last event
	trimmed uint64 // of the last one that isn't kept any more
	// changed is closed with the next event, delivered when a watcher has it or leaves.
	changed, delivered chan struct{}
	watchers           map[*uint64]struct{} // how far each has come
}

// newHistory continues the one of earlier boots, which may be none.
func newHistory(events []Event, boot uint64) history {
	s := history{
		events: events, cursor: boot << bootShift,
		changed: make(chan struct{}), delivered: make(chan struct{}), watchers: map[*uint64]struct{}{},
	}
	if len(events) == maxEvents {
		s.trimmed = events[0].Cursor - 1
	}
	return s
}

func (s *history) add(events ...Event) {
	for _, e := range events {
		s.cursor++
		e.Cursor = s.cursor
		s.events = append(s.events, e)
	}
	if over := len(s.events) - maxEvents; over > 0 {
		s.trimmed = s.events[over-1].Cursor
		s.events = slices.Clone(s.events[over:])
	}
}

// with are the events as they will be when these are added.
func (s history) with(events ...Event) []Event {
	s.events = slices.Clone(s.events)
	s.add(events...)
	return s.events
}

// replace puts the events of another node in place of these; the caller holds mu.
func (s *history) replace(events []Event, boot uint64) {
	s.events, s.cursor = events, max(s.cursor, boot<<bootShift)
	if len(events) > 0 {
		s.trimmed = events[0].Cursor - 1
		s.cursor = max(s.cursor, events[len(events)-1].Cursor)
	}
	renew(&s.changed)
}

// since are the events after a cursor.
func (s *history) since(after uint64) []Event {
	return slices.DeleteFunc(slices.Clone(s.events), func(e Event) bool { return e.Cursor <= after })
}

// behind reports whether a watcher hasn't received the last event yet.
func (s *history) behind() bool {
	for at := range s.watchers {
		if *at < s.cursor {
			return true
		}
	}
	return false
}

// renew closes a channel that others wait for, and makes the next one.
func renew(c *chan struct{}) {
	close(*c)
	*c = make(chan struct{})
}

// Watch sends how an operation stands and all events after a cursor (0: from the
// beginning), then what follows, until the operation has ended.
func (r *Runner) Watch(ctx context.Context, id string, after uint64, send func(Update) error) error {
	x, err := r.find(id)
	if err != nil {
		return err
	}
	seen := new(uint64)
	x.mu.Lock()
	x.history.watchers[seen] = struct{}{}
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(x.history.watchers, seen)
		renew(&x.history.delivered)
	}()
	for {
		x.mu.Lock()
		u := Update{Operation: x.status(), Events: x.history.since(after), Lost: after < x.history.trimmed}
		changed, at := x.history.changed, x.history.cursor
		x.mu.Unlock()
		if err := send(u); err != nil {
			return err
		}
		after = at
		x.mu.Lock()
		*seen = at
		renew(&x.history.delivered)
		x.mu.Unlock()
		if u.Operation.Finished() {
			return nil
		}
		if err := sleep.Await(ctx, changed); err != nil {
			return err
		}
	}
}

// drainWatchers waits until the watchers have received the last event, before the node
// ends.
func (x *execution) drainWatchers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, watcherBudget)
	defer cancel()
	for {
		x.mu.Lock()
		behind, delivered := x.history.behind(), x.history.delivered
		x.mu.Unlock()
		if !behind {
			break
		}
		if sleep.Await(ctx, delivered) != nil {
			return
		}
	}
	sleep.For(ctx, transportBudget)
}

package operation

import (
	"context"
	"slices"
	"time"
)

const (
	// maxEvents bounds what is kept of an operation's story. A drain that tells of
	// each pod of a full node needs half of it.
	maxEvents = 500
	// lastWords is what those who watch get to hear that the node ends, and
	// lastTransport what the gate needs to pass that on.
	lastWords     = 2 * time.Second
	lastTransport = 250 * time.Millisecond

	// A cursor is the boot, and below it the event: what was said after the last
	// write of the journal is lost in a crash, and its cursor must not come again.
	bootShift = 32
	maxBoots  = 1 << 30
)

// EventKind says what an event is about.
type EventKind string

const (
	Said     EventKind = "said"     // by a step, or without one by the operation
	Changed  EventKind = "changed"  // the state of a step, or without one of the operation
	Asks     EventKind = "asks"     // the operation waits for an answer
	Answered EventKind = "answered" // it has one
)

// Event is a line of an operation's story.
type Event struct {
	// Cursor grows from event to event.
	Cursor uint64    `json:"cursor"`
	Time   time.Time `json:"time"`
	Kind   EventKind `json:"kind"`
	Step   string    `json:"step,omitempty"`
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

// story is what an operation has told, and who listens.
type story struct {
	events  []Event
	cursor  uint64 // of the last event
	trimmed uint64 // of the last one that isn't kept any more
	// changed is closed with the next event, heard when a watcher has it or leaves.
	changed, heard chan struct{}
	watchers       map[*uint64]struct{} // how far each has come
}

// newStory continues the one of earlier boots, which may be none.
func newStory(events []Event, boot uint64) story {
	s := story{
		events: events, cursor: boot << bootShift,
		changed: make(chan struct{}), heard: make(chan struct{}), watchers: map[*uint64]struct{}{},
	}
	if len(events) == maxEvents {
		s.trimmed = events[0].Cursor - 1
	}
	return s
}

func (s *story) add(events ...Event) {
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
func (s story) with(events ...Event) []Event {
	s.events = slices.Clone(s.events)
	s.add(events...)
	return s.events
}

// since are the events after a cursor.
func (s *story) since(after uint64) []Event {
	for i, e := range s.events {
		if e.Cursor > after {
			return slices.Clone(s.events[i:])
		}
	}
	return nil
}

// behind tells whether a watcher hasn't got the last event yet.
func (s *story) behind() bool {
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
	l, err := r.find(id)
	if err != nil {
		return err
	}
	seen := new(uint64)
	l.mu.Lock()
	l.story.watchers[seen] = struct{}{}
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.story.watchers, seen)
		renew(&l.story.heard)
	}()
	for {
		l.mu.Lock()
		u := Update{Operation: l.status(), Events: l.story.since(after), Lost: after < l.story.trimmed}
		changed, at := l.story.changed, l.story.cursor
		l.mu.Unlock()
		if err := send(u); err != nil {
			return err
		}
		after = at
		l.mu.Lock()
		*seen = at
		renew(&l.story.heard)
		l.mu.Unlock()
		if u.Operation.Finished() {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// farewell gives those who watch the time to hear the last word before the node
// ends.
func (l *live) farewell(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastWords)
	defer cancel()
	for {
		l.mu.Lock()
		behind, heard := l.story.behind(), l.story.heard
		l.mu.Unlock()
		if !behind {
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-heard:
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(lastTransport):
	}
}

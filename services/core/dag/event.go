package dag

import (
	"context"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

const (
	// ringSize is how many events the graph keeps: days of a calm node, and some
	// 250 restarts of a sick one, in about 200 KiB.
	ringSize = 1024
	// headSize is how many of the first events are kept beside the ring, so that
	// the boot can still be drawn after many restarts.
	headSize = 512
	// queueSize is how far a subscriber may fall behind before it loses the
	// oldest events.
	queueSize = 256
	// messageSize bounds a message, in bytes: errors may carry a tool's output.
	messageSize = 4096
)

// HealthState is what the health checks of a running service say, as users read
// it.
type HealthState string

const (
	HealthUnknown HealthState = "?" // no result yet, or no check
	HealthOK      HealthState = "OK"
	HealthFail    HealthState = "Fail"
)

// Event is one step in the story of a service.
type Event struct {
	Seq       uint64 // grows by one per event of the graph: a gap is a loss
	Service   string
	State     State
	Health    HealthState
	Up        bool // as the graph counts it for dependants
	Message   string
	Reason    reason.Code   // what the message says, for programs; "" unless it has one
	SinceBoot time.Duration // since the kernel's start, monotonic, counting suspend
	Time      time.Time     // by the wall clock, which may be wrong early in a boot
	// After lists the IDs in DependsOn, sorted; in the states Waiting and
	// Preparing only. The boot chart finds the critical path by it.
	After []string
}

// history is the graph's memory of events. The graph's mu guards it.
type history struct {
	head []Event
	ring []Event // at most ringSize; next is the oldest once it is full
	next int
	seq  uint64
	subs map[chan Event]struct{}
}

func (h *history) add(e Event) {
	h.seq++
	e.Seq = h.seq
	if len(h.head) < headSize {
		h.head = append(h.head, e)
	}
	if len(h.ring) < ringSize {
		h.ring = append(h.ring, e)
	} else {
		h.ring[h.next] = e
		h.next = (h.next + 1) % ringSize
	}
	for sub := range h.subs {
		select {
		case sub <- e:
			continue
		default:
		}
		// Full: the oldest goes. Only this function sends, under mu, so there is
		// room afterwards.
		select {
		case <-sub:
		default:
		}
		sub <- e
	}
}

func (h *history) all() []Event {
	events := make([]Event, 0, len(h.ring))
	events = append(events, h.ring[h.next:]...)
	return append(events, h.ring[:h.next]...)
}

// Events returns the last events, oldest first.
func (g *Graph) Events() []Event {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.history.all()
}

// BootEvents returns the first events, oldest first, however many came later:
// what NewChart needs to draw the boot.
func (g *Graph) BootEvents() []Event {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]Event(nil), g.history.head...)
}

// Subscribe returns the events from now on, until ctx ends; then the channel is
// closed. A subscriber that doesn't keep up loses the oldest (Event.Seq has a
// gap) and never holds up the graph.
func (g *Graph) Subscribe(ctx context.Context) <-chan Event {
	sub := make(chan Event, queueSize)
	g.mu.Lock()
	g.history.subs[sub] = struct{}{}
	g.mu.Unlock()
	context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.history.subs, sub)
		close(sub)
	})
	return sub
}

// bounded shortens a message to messageSize, at a character's border.
func bounded(message string) string {
	if len(message) <= messageSize {
		return message
	}
	return strings.ToValidUTF8(message[:messageSize], "") + "…"
}

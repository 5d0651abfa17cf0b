package dag

import (
	"context"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

const (
	// ringSize is how many events the graph keeps: days of a stable node, or some
	// 250 restarts, in about 200 KiB.
	ringSize = 1024
	// headSize is how many of the first events are kept beside the ring, so that
	// the boot can be drawn even after many restarts.
	headSize = 512
	// queueSize is the number of unread events of a subscriber before it loses the
	// oldest ones.
	queueSize = 256
	// messageSize limits a message, in bytes: errors may contain the output of a program.
	messageSize = 4096
)

// HealthState is the result of the health checks of a running service, in the
// words for users.
type HealthState string

const (
	HealthUnknown HealthState = "?" // no result yet, or no check
	HealthOK      HealthState = "OK"
	HealthFail    HealthState = "Fail"
)

// Event is one transition of a service, or a message about it.
type Event struct {
	Seq       uint64 // grows by one per event of the graph: a gap is a loss
	Service   string
	State     State
	Health    HealthState
	Up        bool // for the services that depend on it
	Message   string
	Reason    reason.Code   // the meaning of the message for programs; "" if it has none
	SinceBoot time.Duration // since the kernel's start, monotonic, counting suspend
	Time      time.Time     // by the wall clock, which may be wrong early in the boot
	// After lists the IDs in DependsOn, sorted; only in the states Waiting and
	// Preparing. The boot chart uses it to find the critical path.
	After []string
}

// history stores the graph's events. The graph's mu guards it.
type history struct {
	head []Event
	ring []Event // at most ringSize
	seq  uint64
	subs map[chan Event]struct{}
}

func (h *history) add(e Event) {
	h.seq++
	e.Seq = h.seq
	if len(h.head) < headSize {
		h.head = append(h.head, e)
	}
	h.ring = append(h.ring, e)
	h.ring = h.ring[max(0, len(h.ring)-ringSize):]
	for sub := range h.subs {
		select {
		case sub <- e:
			continue
		default:
		}
		// Full: the oldest is dropped. Only this function sends, under mu, so there
		// is room afterwards.
		select {
		case <-sub:
		default:
		}
		sub <- e
	}
}

// Events returns the last events, oldest first.
func (g *Graph) Events() []Event {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.history.ring)
}

// BootEvents returns the first events, oldest first, however many came later:
// the input of NewChart.
func (g *Graph) BootEvents() []Event {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.history.head)
}

// Subscribe returns the events from now on, until ctx ends; then the channel is
// closed. A subscriber that is too slow loses the oldest (Event.Seq has a gap)
// and never blocks the graph.
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

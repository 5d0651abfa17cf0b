package apid

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// Guests are all callers but administrators and nodes of the cluster. Together they can't
// use all of the node, and one of them can't use all that is for guests.
const (
	// eachTurns: the node works on so many calls of a guest at once, and on guestTurns of
	// all guests. Others wait for their turn. So an administrator's call competes with few,
	// however many come.
	guestTurns = 2
	eachTurns  = 1
	// turnTime is when a call counts as one that waits for something, and not for the
	// processor. It gives its turn to another one, and has a place among the streams.
	turnTime = time.Second
	// turnTimeout is for a call that doesn't get its turn.
	turnTimeout = 30 * time.Second
	// guestBody is the largest request of guests, which is in memory before its turn.
	guestBody = 16 << 10
	// guestRate is for all streams of a guest together, in bytes per second: a log of 2 MiB
	// takes half a second.
	guestRate = 4 << 20
)

// room is what there is a number of.
type room int

const (
	callRoom room = iota
	streamRoom
	configRoom // configurations that come, in maintenance mode
	rooms
)

// guestRooms bound what guests have at once: calls, whatever they wait for, and streams.
// Two hundred clients may have one certificate, with one call each. PID 1 has room for 256
// streams.
var guestRooms = [rooms]struct {
	all, each int
	what      string
}{
	callRoom:   {384, 224, "calls"},
	streamRoom: {128, 48, "streams"},
	configRoom: {8, 2, "configurations"},
}

// quotas are what guests use.
type quotas struct {
	turns chan struct{} // one element per call that has its turn

	mu     sync.Mutex // guards all following fields, and those of guests
	used   [rooms]int
	guests map[string]*guest // that have calls
}

type guest struct {
	name  string
	turns chan struct{} // one element per call that has, or is next to have, its turn
	used  [rooms]int
	paid  time.Time // until when what was sent counts, at guestRate
}

func newQuotas() *quotas {
	return &quotas{turns: make(chan struct{}, guestTurns), guests: make(map[string]*guest)}
}

// enter is a guest with room for one call more.
func (q *quotas) enter(name string) (*guest, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	g := q.guests[name]
	if g == nil {
		g = &guest{name: name, turns: make(chan struct{}, eachTurns)}
	}
	if err := q.takeLocked(g, callRoom); err != nil {
		return nil, err
	}
	q.guests[name] = g
	return g, nil
}

// take takes room for something of a call.
func (q *quotas) take(g *guest, r room) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.takeLocked(g, r)
}

// takeLocked is take for who holds mu.
func (q *quotas) takeLocked(g *guest, r room) error {
	most := guestRooms[r]
	switch {
	case g.used[r] >= most.each:
		return exhausted("the node serves %d %s of this client already, and takes no more; end some of them", most.each, most.what)
	case q.used[r] >= most.all:
		return exhausted("the node serves %d %s of clients that aren't administrators already; try again later", most.all, most.what)
	}
	g.used[r]++
	q.used[r]++
	return nil
}

// leave gives room back. A guest without calls is forgotten.
func (q *quotas) leave(g *guest, r room) {
	q.mu.Lock()
	defer q.mu.Unlock()
	g.used[r]--
	q.used[r]--
	if g.used[callRoom] == 0 {
		delete(q.guests, g.name)
	}
}

// turn waits until it is a call's turn. A stream, and a call that takes long, ends the turn
// before it ends.
func (q *quotas) turn(ctx context.Context, g *guest, stream bool) (end func(), err error) {
	if stream {
		if err := q.take(g, streamRoom); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, turnTimeout, exhausted("the node has been busy with other calls for %s; try again later", turnTimeout))
	defer cancel()
	for _, turns := range []chan struct{}{g.turns, q.turns} {
		select {
		case turns <- struct{}{}:
			continue
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if turns == q.turns {
			<-g.turns
		}
		if stream {
			q.leave(g, streamRoom)
		}
		return nil, err
	}
	var mu sync.Mutex // guards stream and over
	free := sync.OnceFunc(func() { <-q.turns; <-g.turns })
	over := false
	long := time.AfterFunc(turnTime, func() {
		mu.Lock()
		defer mu.Unlock()
		if !over && !stream {
			stream = q.take(g, streamRoom) == nil
		}
		if stream {
			free()
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		long.Stop()
		free()
		if stream {
			q.leave(g, streamRoom)
		}
	}, nil
}

// pay waits until a guest may send more than these bytes.
func (q *quotas) pay(ctx context.Context, g *guest, bytes int) {
	q.mu.Lock()
	now := time.Now()
	if earliest := now.Add(-time.Second); g.paid.Before(earliest) {
		g.paid = earliest
	}
	g.paid = g.paid.Add(time.Duration(bytes) * time.Second / guestRate)
	wait := g.paid.Sub(now)
	q.mu.Unlock()
	if wait > 0 {
		sleep.For(ctx, wait)
	}
}

// paced is the answer of a guest's stream.
type paced struct {
	http.ResponseWriter
	pay func(bytes int)
}

// Write implements http.ResponseWriter.
func (p paced) Write(data []byte) (int, error) {
	n, err := p.ResponseWriter.Write(data)
	p.pay(n)
	return n, err
}

// Unwrap is what http.ResponseController looks for.
func (p paced) Unwrap() http.ResponseWriter { return p.ResponseWriter }

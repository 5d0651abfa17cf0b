package apid

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
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
	configRoom // configurations that come
	rooms
)

var roomNames = [rooms]string{"calls", "streams", "configurations"}

// limit is how many there may be at once: of all clients, and of one of them.
type limit struct{ all, each int }

var (
	// adminRooms are for administrators, who count as one client: two hundred programs have one
	// call each, and some have a few.
	adminRooms = [rooms]limit{callRoom: {384, 384}, streamRoom: {384, 384}, configRoom: {8, 8}}
	// guestRooms bound calls, whatever they wait for, and streams. Two hundred clients may have
	// one certificate, with one call each. PID 1 has room for 256 streams. In maintenance mode
	// strangers bring configurations.
	guestRooms = [rooms]limit{callRoom: {384, 224}, streamRoom: {128, 48}, configRoom: {8, 2}}
)

// quotas are what administrators, or guests, use.
type quotas struct {
	limits [rooms]limit
	turns  *semaphore.Weighted

	mu      sync.Mutex // guards all following fields, and used of clients
	used    [rooms]int
	clients map[string]*client // that have calls
}

type client struct {
	of    *quotas
	name  string
	turns *semaphore.Weighted // of calls that have, or are next to have, their turn
	sent  *rate.Limiter       // bytes of streams
	used  [rooms]int
}

func newQuotas(limits [rooms]limit) *quotas {
	return &quotas{limits: limits, turns: semaphore.NewWeighted(guestTurns), clients: make(map[string]*client)}
}

// enter is a client with room for one call more.
func (q *quotas) enter(name string) (*client, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := q.clients[name]
	if c == nil {
		c = &client{of: q, name: name, turns: semaphore.NewWeighted(eachTurns), sent: rate.NewLimiter(guestRate, guestRate)}
	}
	if err := c.takeLocked(callRoom); err != nil {
		return nil, err
	}
	q.clients[name] = c
	return c, nil
}

// take takes room for something of a call.
func (c *client) take(r room) error {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	return c.takeLocked(r)
}

// takeLocked is take for who holds mu.
func (c *client) takeLocked(r room) error {
	switch most := c.of.limits[r]; {
	case c.of.used[r] >= most.all:
		return exhausted("the node serves %d %s already, and takes no more; try again later", most.all, roomNames[r])
	case c.used[r] >= most.each:
		return exhausted("the node serves %d %s of this client already, and takes no more; end some of them", most.each, roomNames[r])
	}
	c.used[r]++
	c.of.used[r]++
	return nil
}

// leave gives room back. A client without calls is forgotten.
func (c *client) leave(r room) {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.used[r]--
	c.of.used[r]--
	if c.used[callRoom] == 0 {
		delete(c.of.clients, c.name)
	}
}

// turn waits until it is a call's turn. A stream, and a call that takes long, ends the turn
// before it ends.
func (c *client) turn(ctx context.Context, stream bool) (end func(), err error) {
	if stream {
		if err := c.take(streamRoom); err != nil {
			return nil, err
		}
	}
	if err := c.awaitTurn(ctx); err != nil {
		if stream {
			c.leave(streamRoom)
		}
		return nil, err
	}
	var mu sync.Mutex // guards stream and over
	free := sync.OnceFunc(func() {
		c.of.turns.Release(1)
		c.turns.Release(1)
	})
	over := false
	long := time.AfterFunc(turnTime, func() {
		mu.Lock()
		defer mu.Unlock()
		if !over && !stream {
			stream = c.take(streamRoom) == nil
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
			c.leave(streamRoom)
		}
	}, nil
}

// awaitTurn takes a turn of the client's, and then one of all.
func (c *client) awaitTurn(ctx context.Context) error {
	busy := exhausted("the node has been busy with other calls for %s; try again later", turnTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, turnTimeout, busy)
	defer cancel()
	if c.turns.Acquire(ctx, 1) != nil {
		return context.Cause(ctx)
	}
	if c.of.turns.Acquire(ctx, 1) != nil {
		c.turns.Release(1)
		return context.Cause(ctx)
	}
	return nil
}

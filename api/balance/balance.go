// Package balance hands TCP connections to one of several API servers that is
// ready. Every node runs one on loopback, for its kubelet and the other local
// clients, and a development cluster has one as its endpoint.
//
// It knows nothing of what is said: TLS goes from the client to the server. What it
// knows is which servers there are, which may change at any time, and which of them
// say that they are ready, for which it asks each of them again and again.
//
//	listeners ─► upstreams: ready ones first, by rank, in turn within a rank
//	                 ▲ every period: GET /readyz
package balance

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// DialBudget bounds one try to reach an upstream, which is a hop or two away: the
	// first SYN may be lost. One that doesn't answer within it is off, frozen or cut off.
	DialBudget = 3 * time.Second
	// acceptAgain is the pause where no connection can be taken, for want of
	// descriptors for example.
	acceptAgain = 100 * time.Millisecond
	// fullQuiet is how often it is said that there are too many connections.
	fullQuiet = time.Minute
)

// ServerName is in the certificate of every API server of every cluster: the name of
// its own Service. Clients that don't connect to an address of the server's own expect
// this name; other installers' certificates don't have loopback's.
const ServerName = "kubernetes.default.svc"

// Options are what a balancer stands on.
type Options struct {
	// Dial connects to an upstream.
	Dial func(ctx context.Context, upstream string) (net.Conn, error)
	// TLS is by what a server that says that it is ready is believed, its name
	// included; it is called for each handshake. nil: nobody is asked, and all are
	// tried in their order.
	TLS func() *tls.Config
	// Period is how often each is asked; 0: a second.
	Period time.Duration
	// Hold is how long a connection that comes now waits for one that is
	// ready while none has been yet, before it gets to one that isn't: a client that is
	// turned away comes back ever later, and what isn't ready refuses who it would let in
	// a moment later. Once one has been ready, to learn soon that all are gone is better.
	Hold time.Duration
	// Max bounds the connections of clients; 0: there is no limit.
	Max int
	// Changed, unless nil, is called when Upstreams has something new to tell. It must
	// not block.
	Changed func()
	Log     *slog.Logger
}

// Upstream is one server.
type Upstream struct {
	Name string // what Dial takes; no two have the same
	// Rank: as long as one of a lower rank is ready, those of a higher one get nothing.
	Rank int
}

// Status is what is known of an upstream.
type Status struct {
	Upstream
	Ready bool
	// Reachable is whether it spoke TLS on the last connection that was tried, ready or
	// not.
	Reachable bool
	Since     time.Time // when Ready became so; zero: it wasn't asked yet
	Err       error     // why it isn't ready, as it was first seen
}

// Balancer is a balancer. Close ends it.
type Balancer struct {
	o      Options
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	done   sync.WaitGroup // listeners, checks and connections
	ready  chan struct{}  // closed once an upstream has been ready
	once   sync.Once      // closes ready

	mu        sync.Mutex // guards all below, and what is in the backends but their names
	listeners map[net.Listener]struct{}
	backends  map[string]*backend
	turn      int
	clients   map[net.Conn]net.Listener
	full      time.Time // when it was last said that there are too many
}

// backend is an upstream with what goes on there.
type backend struct {
	Status
	bad     int                   // checks that it has failed in a row
	open    map[net.Conn]struct{} // connections to it
	retired bool                  // gets no new ones, and is forgotten with the last
	now     chan struct{}         // asks for a check at once
}

// New makes a balancer without upstreams.
func New(o Options) *Balancer {
	o.Period = cmp.Or(o.Period, defaultPeriod)
	// The turn begins anywhere, or the clients of all nodes would begin with the same.
	b := &Balancer{
		o: o, listeners: map[net.Listener]struct{}{}, backends: map[string]*backend{}, clients: map[net.Conn]net.Listener{}, turn: rand.IntN(1 << 16),
		ready: make(chan struct{}),
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// Set says which servers there are. Connections to one that is no longer among them
// go on while it is ready: a list may be wrong for a moment.
func (b *Balancer) Set(upstreams []Upstream) {
	b.mu.Lock()
	wanted := map[string]bool{}
	for _, u := range upstreams {
		wanted[u.Name] = true
		n := b.backends[u.Name]
		if n == nil {
			n = &backend{Status: Status{Upstream: u}, open: map[net.Conn]struct{}{}, now: make(chan struct{}, 1)}
			b.backends[u.Name] = n
			if b.o.TLS != nil {
				b.done.Go(func() { b.check(n, u.Name) })
			}
		}
		n.Rank, n.retired = u.Rank, false
	}
	for name, n := range b.backends {
		if wanted[name] {
			continue
		}
		if n.retired = true; b.o.TLS == nil {
			delete(b.backends, name)
		}
	}
	b.signal()
	b.mu.Unlock()
	b.changed()
}

// signal tells those who wait that an upstream is ready. The caller holds mu.
func (b *Balancer) signal() {
	if b.anyReady() {
		b.once.Do(func() { close(b.ready) })
	}
}

func (b *Balancer) changed() {
	if b.o.Changed != nil {
		b.o.Changed()
	}
}

// Upstreams are those that were set, by rank and name.
func (b *Balancer) Upstreams() []Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []Status
	for _, n := range b.current() {
		all = append(all, n.Status)
	}
	return all
}

// current are the backends that aren't retired, by rank and name. The caller holds mu.
func (b *Balancer) current() []*backend {
	all := slices.DeleteFunc(slices.Collect(maps.Values(b.backends)), func(n *backend) bool { return n.retired })
	slices.SortFunc(all, func(m, n *backend) int {
		return cmp.Or(cmp.Compare(m.Rank, n.Rank), strings.Compare(m.Name, n.Name))
	})
	return all
}

// Serve hands out the connections of l until Close. It doesn't block.
func (b *Balancer) Serve(l net.Listener) {
	b.mu.Lock()
	b.listeners[l] = struct{}{}
	b.mu.Unlock()
	b.done.Go(func() {
		for {
			conn, err := l.Accept()
			switch {
			case err == nil:
				b.take(l, conn)
			case errors.Is(err, net.ErrClosed) || b.ctx.Err() != nil:
				return
			default:
				b.o.Log.Error("take a connection", "at", l.Addr().String(), "error", err)
				b.rest(acceptAgain, nil)
			}
		}
	})
}

// rest waits for d, or for a mark; false says that the balancer is closed.
func (b *Balancer) rest(d time.Duration, mark <-chan struct{}) bool {
	select {
	case <-time.After(d):
	case <-mark:
	case <-b.ctx.Done():
	}
	return b.ctx.Err() == nil
}

// End closes l, and the connections that came from there.
func (b *Balancer) End(l net.Listener) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end(l)
}

// end is for who holds mu.
func (b *Balancer) end(l net.Listener) {
	l.Close()
	delete(b.listeners, l)
	for conn, from := range b.clients {
		if from == l {
			conn.Close()
		}
	}
}

// Close ends listening and all connections: those who have one make another, to
// whoever listens then.
func (b *Balancer) Close() {
	b.cancel()
	b.mu.Lock()
	for l := range b.listeners {
		b.end(l)
	}
	b.mu.Unlock()
	b.done.Wait()
}

func (b *Balancer) take(l net.Listener, conn net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, on := b.listeners[l]; !on {
		conn.Close()
		return
	}
	if b.o.Max > 0 && len(b.clients) >= b.o.Max {
		conn.Close()
		if time.Since(b.full) > fullQuiet {
			b.full = time.Now()
			b.o.Log.Warn("a connection is refused: there are too many", "limit", b.o.Max, "from", conn.RemoteAddr().String())
		}
		return
	}
	b.clients[conn] = l
	b.done.Go(func() {
		b.hand(conn)
		conn.Close()
		b.mu.Lock()
		delete(b.clients, conn)
		b.mu.Unlock()
	})
}

func (b *Balancer) hand(conn net.Conn) {
	if b.o.Hold > 0 && !b.rest(b.o.Hold, b.ready) {
		return
	}
	for _, n := range b.order() {
		ctx, cancel := context.WithTimeout(b.ctx, DialBudget)
		peer, err := b.o.Dial(ctx, n.Name)
		cancel()
		if err != nil {
			n.askNow()
			continue
		}
		b.mu.Lock()
		n.open[peer] = struct{}{}
		b.mu.Unlock()
		splice(conn, peer)
		b.mu.Lock()
		delete(n.open, peer)
		b.mu.Unlock()
		return
	}
}

// order is whom to try for the next connection: who is ready, by rank; then, as
// nobody may have been asked yet, the others.
func (b *Balancer) order() []*backend {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn++
	place := func(n *backend) [2]int {
		if n.Ready {
			return [2]int{0, n.Rank}
		}
		return [2]int{1, n.Rank}
	}
	all := b.current()
	slices.SortStableFunc(all, func(m, n *backend) int {
		p, q := place(m), place(n)
		return slices.Compare(p[:], q[:])
	})
	for rest := all; len(rest) > 0; {
		size := 1 // of those that take turns
		for size < len(rest) && place(rest[size]) == place(rest[0]) {
			size++
		}
		turn := b.turn % size
		copy(rest, slices.Concat(rest[turn:size], rest[:turn]))
		rest = rest[size:]
	}
	return all
}

type halfCloser interface{ CloseWrite() error }

// splice copies both ways until both sides are done, passing on half-closes.
func splice(a, b net.Conn) {
	defer b.Close()
	var both sync.WaitGroup
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if h, ok := to.(halfCloser); ok && err == nil {
			_ = h.CloseWrite()
			return
		}
		to.Close() // broken: the other direction mustn't wait
		from.Close()
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
}

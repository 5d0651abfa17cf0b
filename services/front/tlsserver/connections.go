package tlsserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// callGrace is how long calls go on that were let in before a change: the
	// answer to a configuration that ends maintenance mode is one.
	callGrace = 30 * time.Second
	// idleGrace is for a client to read why it is refused.
	idleGrace = time.Second
)

// manyOfGuest connections of a guest are more than some programs have, which make one for
// each call. When all are in use, the guest with the most loses one.
const manyOfGuest = 16

// Conn is a connection of a client.
type Conn struct {
	net.Conn
	// Memo is for the server: what it stores about the client.
	Memo atomic.Value
	list *Conns

	// list.mu guards all following fields.
	state        http.ConnState
	since        time.Time           // in state
	chain        []*x509.Certificate // of the client; set after the handshake
	refusedSince time.Time           // since when the client isn't allowed; zero: it is allowed
	guest        string              // see SetGuest
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.list.mu.Lock()
	delete(c.list.all, c)
	c.list.mu.Unlock()
	return c.Conn.Close()
}

// SetGuest says whose connection this is, of a client that makes place for others.
func (c *Conn) SetGuest(name string) {
	l := c.list
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.guest == name {
		return
	}
	c.guest = name
	guests := 0
	for other := range l.all {
		if other.guest != "" {
			guests++
		}
	}
	if guests > l.MaxGuests {
		l.evict(l.oldestOfMost(1, guestOf))
	}
}

func guestOf(c *Conn) string { return c.guest }

type connKey struct{}

// Of is the connection of a request.
func Of(ctx context.Context) *Conn {
	c, _ := ctx.Value(connKey{}).(*Conn)
	return c
}

// under is our connection below TLS.
func under(c net.Conn) *Conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	own, _ := c.(*Conn)
	return own
}

// Conns are the connections that are open.
type Conns struct {
	// Max bounds all connections: with HTTP/2 a client needs one.
	Max int
	// MaxNew bounds the connections whose client hasn't sent a request yet. One more
	// replaces the oldest of them: unknown clients can't lock out others, they only
	// shorten the time for a handshake.
	MaxNew int
	// MaxGuests bounds the connections of guests. One more replaces the oldest of the guest
	// who has the most.
	MaxGuests int

	mu  sync.Mutex // guards all
	all map[*Conn]struct{}
}

// Len is how many there are.
func (l *Conns) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all)
}

// limited is a listener whose connections are counted.
type limited struct {
	net.Listener
	open *Conns
}

// Accept implements net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if own := l.open.add(c); own != nil {
			return own, nil
		}
		_ = c.Close() // all connections are in use
	}
}

// add accepts a connection, if necessary in place of another one. It returns nil
// when all are in use and no other host has too many of them.
func (l *Conns) add(c net.Conn) *Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting, many := l.oldest(http.StateNew)
	if many >= l.MaxNew {
		l.evict(waiting)
	} else if len(l.all) >= l.Max {
		idle, _ := l.oldest(http.StateIdle) // its client makes another one when it needs it
		gone := cmp.Or(idle, l.oldestOfMost(manyOfGuest, guestOf), waiting)
		if gone == nil {
			many := 2 // more than the host of c has
			for other := range l.all {
				if hostOf(other) == hostOf(c) {
					many++
				}
			}
			gone = l.oldestOfMost(many, func(c *Conn) string { return hostOf(c) })
		}
		if gone == nil {
			return nil
		}
		l.evict(gone)
	}
	own := &Conn{Conn: c, list: l, state: http.StateNew, since: time.Now()}
	if l.all == nil {
		l.all = make(map[*Conn]struct{})
	}
	l.all[own] = struct{}{}
	return own
}

// oldest is the connection that has been in a state for longest, and how many are
// in it. The caller holds mu.
func (l *Conns) oldest(state http.ConnState) (found *Conn, count int) {
	for c := range l.all {
		if c.state != state {
			continue
		}
		if count++; found == nil || c.since.Before(found.since) {
			found = c
		}
	}
	return found, count
}

// oldestOfMost is the oldest connection of the client that has the most, if these are at
// least many: so no client can lock out all others. A connection without a client's name
// doesn't count. The caller holds mu.
func (l *Conns) oldestOfMost(many int, client func(*Conn) string) (oldest *Conn) {
	count := make(map[string]int)
	for c := range l.all {
		if name := client(c); name != "" {
			count[name]++
			many = max(many, count[name])
		}
	}
	for c := range l.all {
		if count[client(c)] == many && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	return oldest
}

// hostOf is the client's address.
func hostOf(c net.Conn) string {
	if tcp, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("").String()
	}
	return ""
}

// evict closes a connection. The caller holds mu.
func (l *Conns) evict(c *Conn) {
	delete(l.all, c)
	_ = c.Conn.Close() // it is of no more use either way
}

// changed is http.Server.ConnState.
func (l *Conns) changed(c net.Conn, state http.ConnState) {
	own := under(c)
	if own == nil {
		return
	}
	var chain []*x509.Certificate
	if t, ok := c.(*tls.Conn); ok && state != http.StateNew {
		chain = t.ConnectionState().PeerCertificates
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if own.state != state {
		own.state, own.since, own.chain = state, time.Now(), chain
	}
}

// Sweep closes the connections of clients that aren't allowed any longer: idle ones after
// idleGrace, others after callGrace.
func (l *Conns) Sweep(allowed func(c *Conn, chain []*x509.Certificate) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.all {
		if c.state == http.StateNew {
			continue // each call of it is looked at
		}
		switch {
		case allowed(c, c.chain):
			c.refusedSince = time.Time{}
			continue
		case c.refusedSince.IsZero():
			c.refusedSince = time.Now()
		}
		idle := c.state == http.StateIdle && time.Since(c.since) > idleGrace
		if idle || time.Since(c.refusedSince) > callGrace {
			l.evict(c)
		}
	}
}

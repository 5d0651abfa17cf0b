package connlimit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/netip"
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
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.list.mu.Lock()
	delete(c.list.all, c)
	c.list.mu.Unlock()
	return c.Conn.Close()
}

type connKey struct{}

// withConn is http.Server.ConnContext.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, under(c))
}

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
		idle, _ := l.oldest(http.StateIdle)
		switch {
		case idle != nil: // its client makes another one when it needs it
			l.evict(idle)
		case waiting != nil:
			l.evict(waiting)
		default:
			busiest := l.oldestOfBusiest(hostOf(c))
			if busiest == nil {
				return nil
			}
			l.evict(busiest)
		}
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

// oldestOfBusiest is the oldest connection of the host that has the most, if that host
// has at least two more than host: so no host can lock out all others. The caller holds
// mu.
func (l *Conns) oldestOfBusiest(host netip.Addr) (oldest *Conn) {
	count := make(map[netip.Addr]int)
	for c := range l.all {
		count[hostOf(c)]++
	}
	most := count[host] + 2
	for _, n := range count {
		most = max(most, n)
	}
	for c := range l.all {
		host := hostOf(c)
		if count[host] == most && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	return oldest
}

// hostOf is the client's address.
func hostOf(c net.Conn) netip.Addr {
	if tcp, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
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

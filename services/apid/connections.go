package apid

import (
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
	// maxConns bounds all connections: with HTTP/2 a client needs one.
	maxConns = 400
	// maxFresh bounds those that haven't said yet who they are; two hundred clients
	// may come at once. When one more comes, the oldest goes: strangers can't keep
	// others out, only hurry them.
	maxFresh = 256
	// callGrace is how long calls go on that were let in before a change: the
	// answer to a configuration that ends maintenance mode is one.
	callGrace = 30 * time.Second
	// idleGrace is for a client that reads why it is refused.
	idleGrace = time.Second
)

// conn is a connection of a client.
type conn struct {
	net.Conn
	list  *connections
	trust atomic.Pointer[verdict]

	// list.mu guards all following fields.
	state  http.ConnState
	since  time.Time           // in state
	chain  []*x509.Certificate // of the client; once it isn't new any more
	doomed time.Time           // not welcome since then; zero: it is
}

// verdict is who the caller is, by one state.
type verdict struct {
	by  *state
	who caller
	err error
}

// identify is state.identify, once per connection and state.
func (c *conn) identify(s *state, chain []*x509.Certificate) (caller, error) {
	if v := c.trust.Load(); v != nil && v.by == s {
		return v.who, v.err
	}
	who, err := s.identify(chain)
	c.trust.Store(&verdict{s, who, err})
	return who, err
}

// Close implements net.Conn.
func (c *conn) Close() error {
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

func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// under is our connection below TLS.
func under(c net.Conn) *conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	own, _ := c.(*conn)
	return own
}

// connections are those that are open.
type connections struct {
	mu  sync.Mutex // guards all
	all map[*conn]struct{}
}

// limited is a listener whose connections are counted.
type limited struct {
	net.Listener
	open *connections
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
		_ = c.Close() // there is no place for it, and nobody to tell
	}
}

// add takes a connection in, if need be in place of another one. It returns nil
// when all are in use.
func (l *connections) add(c net.Conn) *conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	fresh, many := l.oldest(http.StateNew)
	if many >= maxFresh {
		l.evict(fresh)
	} else if len(l.all) >= maxConns {
		idle, _ := l.oldest(http.StateIdle)
		switch {
		case idle != nil: // its client makes another one when it needs it
			l.evict(idle)
		case fresh != nil:
			l.evict(fresh)
		default:
			return nil
		}
	}
	own := &conn{Conn: c, list: l, state: http.StateNew, since: time.Now()}
	if l.all == nil {
		l.all = make(map[*conn]struct{})
	}
	l.all[own] = struct{}{}
	return own
}

// oldest is the connection that has been in a state for longest, and how many are
// in it. The caller holds mu.
func (l *connections) oldest(state http.ConnState) (found *conn, count int) {
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

// evict closes a connection. The caller holds mu.
func (l *connections) evict(c *conn) {
	delete(l.all, c)
	_ = c.Conn.Close() // it is of no more use either way
}

// changed is http.Server.ConnState.
func (l *connections) changed(c net.Conn, state http.ConnState) {
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

// sweep ends the connections of those who may not come in by s, or by the clock,
// any longer: where no call runs soon, and else after callGrace.
func (l *connections) sweep(s *state, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.all {
		if c.state == http.StateNew {
			continue // each call of it is looked at
		}
		who, err := c.identify(s, c.chain)
		if err == nil {
			err = who.current(now)
		}
		switch {
		case err == nil && s.mode != modeClosed:
			c.doomed = time.Time{}
			continue
		case c.doomed.IsZero():
			c.doomed = time.Now()
		}
		idle := c.state == http.StateIdle && time.Since(c.since) > idleGrace
		if idle || time.Since(c.doomed) > callGrace {
			l.evict(c)
		}
	}
}

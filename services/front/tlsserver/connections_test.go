package tlsserver

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"testing"
)

// conn is a connection from somewhere.
type conn struct {
	net.Conn
	from   string
	closed bool
}

func (c *conn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(c.from), 40000))
}

func (c *conn) Close() error { c.closed = true; return nil }

// come is a connection from somewhere that is in use, if it was taken in.
func come(l *Conns, from string) (*conn, bool) {
	c := &conn{from: from}
	own := l.add(c)
	if own == nil {
		return c, false
	}
	l.changed(own, http.StateActive)
	return c, true
}

// All places are in use: a host that has many of them makes place for one that has few,
// and not the other way round.
func TestOneHostDoesntKeepOthersOut(t *testing.T) {
	t.Parallel()
	l := &Conns{Max: 8, MaxNew: 4}
	var crowd []*conn
	for range 6 {
		c, _ := come(l, "192.0.2.66")
		crowd = append(crowd, c)
	}
	first, _ := come(l, "192.0.2.20")
	second, _ := come(l, "2001:db8::1")
	if c, ok := come(l, "192.0.2.66"); ok || c.closed {
		t.Error("the crowd grows")
	}
	for i := range 4 { // until all but the crowd's last two have gone to others
		if _, ok := come(l, fmt.Sprintf("192.0.2.%d", 21+i)); !ok {
			t.Errorf("%d: there is no place", i)
		}
	}
	for i, c := range crowd {
		if c.closed != (i < 4) {
			t.Errorf("connection %d of the crowd: closed %v", i, c.closed)
		}
	}
	if first.closed || second.closed || l.Len() != 8 {
		t.Errorf("closed %v, %v; %d are open", first.closed, second.closed, l.Len())
	}
	// Where it is a single connection more, it is nobody's turn to go.
	if _, ok := come(l, "192.0.2.20"); ok {
		t.Error("a second one of a host took the place of one of two")
	}
	if _, ok := come(l, "192.0.2.30"); !ok || !crowd[4].closed {
		t.Error("a first one didn't take the place of one of two")
	}
	if _, ok := come(l, "192.0.2.31"); ok {
		t.Error("everybody has one, and one of them had to go")
	}
}

// All places are in use by guests and an administrator of the same host: whoever comes has
// the place of the guest who has the most, and neither an administrator's nor one of a
// handshake that goes on.
func TestGuestsMakePlace(t *testing.T) {
	t.Parallel()
	l := &Conns{Max: 3 * manyOfGuest, MaxNew: 4, MaxGuests: 3 * manyOfGuest}
	admin, _ := come(l, "192.0.2.66")
	shakes := &conn{from: "192.0.2.66"}
	l.add(shakes)
	var crowd []*conn
	for i := range 3*manyOfGuest - 2 {
		c := &conn{from: "192.0.2.66"}
		own := l.add(c)
		l.changed(own, http.StateActive)
		name := "mallory"
		if i%10 == 0 {
			name = "trent"
		}
		own.SetGuest(name)
		crowd = append(crowd, c)
	}
	for i := range 4 {
		if _, ok := come(l, "192.0.2.66"); !ok {
			t.Errorf("%d: there is no place", i)
		}
	}
	if admin.closed || shakes.closed {
		t.Errorf("closed: the administrator's %v, the handshake's %v", admin.closed, shakes.closed)
	}
	for i, c := range crowd {
		if want := i < 5 && i != 0; c.closed != want {
			t.Errorf("connection %d of the crowd: closed %v", i, c.closed)
		}
	}
}

// Guests have a bound of their own, below that of all.
func TestGuestsLeaveRoom(t *testing.T) {
	t.Parallel()
	l := &Conns{Max: 8, MaxNew: 4, MaxGuests: 4}
	one, _ := come(l, "192.0.2.1")
	var crowd []*conn
	for i := range 5 {
		c := &conn{from: "192.0.2.2"}
		own := l.add(c)
		l.changed(own, http.StateActive)
		own.SetGuest([]string{"mallory", "trent"}[i/4])
		own.SetGuest([]string{"mallory", "trent"}[i/4]) // each call says so
		crowd = append(crowd, c)
	}
	for i, c := range crowd {
		if c.closed != (i == 0) {
			t.Errorf("connection %d: closed %v", i, c.closed)
		}
	}
	if one.closed || l.Len() != 5 {
		t.Errorf("another's is closed: %v; %d are open", one.closed, l.Len())
	}
}

// Package freeport finds ports of the loopback for programs that tests start.
package freeport

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
)

// Those from first to last are below the ones that the kernel gives to connections
// (ip_local_port_range in ip(7)), and below those of development clusters. What port 0
// gives may be a connection's by the time that the program listens.
const first, last = 10000, 19999

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Find returns an address at which nobody listens.
func Find(t testing.TB) netip.AddrPort {
	t.Helper()
	for {
		at := netip.AddrPortFrom(loopback, uint16(first+rand.IntN(last-first+1)))
		l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
		if err == nil {
			l.Close()
			return at
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
}

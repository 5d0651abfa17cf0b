// Package freeport keeps ports of the loopback for tests: for programs that they start,
// and for servers that are to be off.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// Find returns an address of the loopback that refuses connections until the test
// listens there. Nobody else gets its port before the test has ended.
func Find(t testing.TB) netip.AddrPort {
	t.Helper()
	at, release, err := Keep()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return at
}

// Listen listens at a port that many tests want, on an address of the loopback that no
// other one has.
func Listen(t testing.TB, port uint16) (net.Listener, netip.Addr) {
	t.Helper()
	const tries = 20 // an address is taken by chance, once in a million
	var err error
	for range tries {
		addr := netip.AddrFrom4([4]byte{127, byte(1 + rand.IntN(250)), byte(rand.IntN(256)), byte(1 + rand.IntN(250))})
		var l net.Listener
		if l, err = net.Listen("tcp4", netip.AddrPortFrom(addr, port).String()); err == nil {
			t.Cleanup(func() { l.Close() })
			return l, addr
		}
	}
	t.Fatal(err)
	return nil, netip.Addr{}
}

// Keep is Find for who has no testing.TB: the port is kept until release.
//
// A port that was found by listening at it is anybody's once that has ended: the kernel
// gives it to the next listener at port 0, or to a connection. So it stays bound here
// without a listener. Only who asks for this very port with SO_REUSEADDR may have it
// beside us (socket(7)), as the listeners of Go's net do; who asks for any gets another.
func Keep() (at netip.AddrPort, release func(), err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return at, nil, fmt.Errorf("keep a port: %w", err)
	}
	if at, err = bind(fd); err != nil {
		_ = unix.Close(fd)
		return at, nil, fmt.Errorf("keep a port: %w", err)
	}
	return at, func() { _ = unix.Close(fd) }, nil
}

func bind(fd int) (at netip.AddrPort, err error) {
	loopback := [4]byte{127, 0, 0, 1}
	// The option comes after: with it, bind would share another's port.
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback}); err != nil {
		return at, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return at, err
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return at, err
	}
	return netip.AddrPortFrom(netip.AddrFrom4(loopback), uint16(name.(*unix.SockaddrInet4).Port)), nil
}

package freeport

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A port that is kept refuses connections, is nobody's who asks for any, and the test's
// that asks for it. One that was only found by listening is given again: here, where the
// kernel has two to give.
func TestAPortIsKept(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	isolate(t)
	give(t, "40000 40001")
	found := listen(t, "127.0.0.1:0")
	at := found.Addr().String()
	found.Close()
	first, second := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	if got := []string{first.Addr().String(), second.Addr().String()}; at != got[0] && at != got[1] {
		t.Errorf("%s was closed, and isn't given again: %s", at, got)
	}
	first.Close()
	second.Close()

	kept, release, err := Keep()
	if err != nil {
		t.Fatal(err)
	}
	other := listen(t, "127.0.0.1:0")
	if other.Addr().String() == kept.String() {
		t.Errorf("%s is kept, and given to a listener", kept)
	}
	for _, anywhere := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0"} {
		if l, err := net.Listen("tcp", anywhere); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: %v, %v", anywhere, l, err)
		}
	}
	if _, _, err := Keep(); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("it is kept twice: %v", err)
	}
	// A connection needs a port, too: none is left.
	if conn, err := net.Dial("tcp", other.Addr().String()); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("a connection: %v, %v", conn, err)
	}

	// From here on connections have ports of their own.
	give(t, "40000 40009")
	for range 2 { // a program may begin again
		refuses(t, kept)
		own := listen(t, kept.String())
		conn, err := net.Dial("tcp", kept.String())
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		own.Close()
	}
	refuses(t, kept)
	release()
	other.Close()
	give(t, "40000 40001")
	first, second = listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	if got := []string{first.Addr().String(), second.Addr().String()}; kept.String() != got[0] && kept.String() != got[1] {
		t.Errorf("%s isn't kept any more, and isn't given: %s", kept, got)
	}
}

func refuses(t *testing.T, at netip.AddrPort) {
	t.Helper()
	if conn, err := net.Dial("tcp", at.String()); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%s, where nobody listens: %v, %v", at, conn, err)
	}
}

func listen(t *testing.T, at string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// give tells the kernel which ports it may give.
func give(t *testing.T, ports string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(ports), 0); err != nil {
		t.Fatal(err)
	}
}

// isolate gives the test a network namespace with a loopback. Its thread isn't unlocked,
// and so ends with the test.
func isolate(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		t.Fatal(err)
	}
	lo.SetUint16(unix.IFF_UP)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		t.Fatal(err)
	}
}

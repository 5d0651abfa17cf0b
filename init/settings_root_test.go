package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
)

// These never change: all clients of a node use them.
const apidPort, trustdPort = 50000, 50001

// The kernel gives none of the machine API's ports to a connection. The
// negative twin: if they aren't reserved it does, and the server can't listen.
func TestPortsOfServersAreReserved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	isolate(t)
	server := tcp(t)
	if err := listen(server, local(0)); err != nil {
		t.Fatal(err)
	}
	peer, err := unix.Getsockname(server)
	if err != nil {
		t.Fatal(err)
	}
	const rangeOfPorts = "/proc/sys/net/ipv4/ip_local_port_range"
	if err := os.WriteFile(rangeOfPorts, fmt.Appendf(nil, "%d %d", apidPort, trustdPort), 0); err != nil {
		t.Fatal(err)
	}
	for range 2 { // both ports
		if err := unix.Connect(tcp(t), peer); err != nil {
			t.Fatalf("with nothing reserved: %v", err)
		}
	}
	for _, port := range []int{apidPort, trustdPort} {
		if err := listen(tcp(t), local(port)); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("port %d is free beside a connection from it: %v", port, err)
		}
	}

	isolate(t)
	server = tcp(t)
	if err := listen(server, peer); err != nil {
		t.Fatal(err)
	}
	applySettings("/proc/sys", settingsFor(boot.Container), func(s boot.Setting, err error) { t.Logf("%s: %v", s.Name, err) })
	if err := os.WriteFile(rangeOfPorts, fmt.Appendf(nil, "%d %d", apidPort, trustdPort), 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(tcp(t), peer); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("a connection got a port that is reserved: %v", err)
	}
	for _, port := range []int{apidPort, trustdPort} {
		if err := listen(tcp(t), local(port)); err != nil {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

// isolate gives the test a network namespace with a loopback. Its thread isn't
// unlocked, and so ends with the test.
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
	if err := unix.IoctlIfreq(tcp(t), unix.SIOCSIFFLAGS, lo); err != nil {
		t.Fatal(err)
	}
}

func tcp(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// listen makes a socket listen as Go's net does.
func listen(fd int, at unix.Sockaddr) error {
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, at), unix.Listen(fd, 8))
}

func local(port int) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
}

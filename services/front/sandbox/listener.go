package sandbox

import (
	"net"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Only takes connections of the process of one service, as the kernel knows it (SO_PEERCRED,
// unix(7)). The directory of a socket is visible to pods that mount the root directory, and
// they may be root: what they say isn't read.
type Only struct {
	net.Listener
	PID *atomic.Int64 // Runner.PID
}

// Accept closes all other connections at once, so that they take no room of the service's.
func (l Only) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if pid := peer(c); pid > 0 && pid == l.PID.Load() {
			return c, nil
		}
		c.Close()
	}
}

// peer is the process that has connected, in PID 1's numbers; 0: unknown.
func peer(c net.Conn) (pid int64) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return 0
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0
	}
	err = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int64(cred.Pid)
		}
	})
	if err != nil {
		return 0
	}
	return pid
}

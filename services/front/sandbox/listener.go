package sandbox

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/sleep"
	"golang.org/x/sys/unix"
)

// SocketPath is the Socket, for its service.
const SocketPath = "/proc/self/fd/3"

// Socket is where one service reaches PID 1. It has no name in any file system: pods that mount the root directory, and
// may be root, don't find it. The service inherits it as an open path (O_PATH, open(2)). Only the process of the
// service may connect, as the kernel knows it (SO_PEERCRED, unix(7)): what others say isn't read.
type Socket struct {
	PID  atomic.Int64 // the process of the service, which Runner sets
	uid  int
	name string // "": none
	path atomic.Pointer[os.File]
	made chan struct{} // closed when path is there
	once sync.Once     // closes made
}

// NewSocket is a socket for a service of this user. Tests give it a name.
func NewSocket(uid int, name string) *Socket {
	return &Socket{uid: uid, name: name, made: make(chan struct{})}
}

// Listen makes the socket. What runs since before an earlier call has the former one.
func (s *Socket) Listen() (net.Listener, error) {
	name := s.name
	if name == "" {
		dir, err := os.MkdirTemp(boot.PrivateDir, "socket-")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		name = filepath.Join(dir, "socket")
	}
	l, err := net.Listen("unix", name)
	if err != nil {
		return nil, err
	}
	path, err := os.OpenFile(name, unix.O_PATH, 0)
	if err := errors.Join(err, os.Chmod(name, 0o600), os.Chown(name, s.uid, s.uid)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s.path.Store(path)
	s.once.Do(func() { close(s.made) })
	return only{l, &s.PID}, nil
}

func (*Socket) String() string { return "PID 1 to listen" }

// Wait implements dag.Condition.
func (s *Socket) Wait(ctx context.Context) error { return sleep.Await(ctx, s.made) }

type only struct {
	net.Listener
	pid *atomic.Int64
}

// Accept closes all other connections at once, so that they take no room of the service's.
func (l only) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, passing{err}
		}
		if pid := peer(c); pid > 0 && pid == l.pid.Load() {
			return c, nil
		}
		c.Close()
	}
}

// passing is an error that net/http tries again after: the service has no other way to PID 1 than this listener.
type passing struct{ error }

func (passing) Timeout() bool     { return false }
func (p passing) Temporary() bool { return !errors.Is(p.error, net.ErrClosed) }
func (p passing) Unwrap() error   { return p.error }

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

// Package apid is the gate of the machine API, and PID 1's side of it.
//
// The gate is the only program of a node that strangers talk to before anything
// is known about them. So it is a process of its own, in a sandbox (Main). It
// ends TLS, finds out who calls, looks up who may call that method, and hands
// what is allowed to PID 1 over a socket. All that it knows lies in a directory
// that PID 1 writes (Service) and that it looks at every second: so certificates
// are renewed, authorities replaced, and maintenance mode left, without a restart.
//
//	client ──mTLS 1.3──▶ gate ──h2c, machine.sock──▶ PID 1
//	                      ▲ mode, certificate, authorities
//	                      └── /run/garboard/apid ◀── Service, in PID 1
//
// Nothing in the gate grows without limit: connections, calls, headers, bodies,
// and what is buffered for a reader that is slow. What is not declared is denied.
package apid

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
)

const (
	// ID of the service.
	ID = "apid"
	// Command is the argument with which PID 1's program becomes the gate.
	Command = "apid"
	// UID is the user and the group of the gate.
	UID = 50
)

const (
	// gcPercent: the gate lives in the budget of the idle node. Its garbage is
	// short-lived, and collecting it twice as often costs a percent of a core.
	gcPercent = 50
	// goMemory is from where on Go collects more often, in bytes: with 200 clients a
	// third of it is garbage otherwise. Beyond it the gate goes on, only slower.
	goMemory = 30 << 20
	// maxProcs bounds the caches that Go's runtime keeps for each processor. Two do
	// more TLS handshakes in a second than a node has clients.
	maxProcs = 2
)

// Main is the gate's process. It returns the exit status.
func Main() int {
	return runAt(boot.APIDir, boot.MachineSocket, net.JoinHostPort("", strconv.Itoa(api.Port)))
}

func runAt(dir, socket, address string) int {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(goMemory)
	runtime.GOMAXPROCS(min(maxProcs, runtime.GOMAXPROCS(0)))
	// The log of the service has the time of each line.
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, log, dir, socket, address); err != nil {
		log.Error(err.Error())
		return 1
	}
	return 0
}

func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

func run(ctx context.Context, log *slog.Logger, dir, socket, address string) error {
	g, err := newGate(dir, socket, log)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	return g.serve(ctx, listener)
}

// errClosed is why nobody may come in while the node is between its modes.
var errClosed = errors.New("the node has a configuration, but no certificate for its API yet")

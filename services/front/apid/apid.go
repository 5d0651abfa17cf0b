// Package apid is the gate of the machine API, and PID 1's side of it.
//
// The gate accepts connections from clients that aren't authenticated yet. So it is
// a process of its own, in a sandbox (Main). It ends TLS, identifies the caller,
// checks that the caller may call the method, and forwards allowed calls to PID 1
// over a socket. Its state is in a directory that PID 1 writes (Service) and that it
// checks every second: so certificates are renewed, authorities replaced, and
// maintenance mode left, without a restart.
//
//	client ──mTLS 1.3──▶ gate ──h2c, socket──▶ PID 1
//	                      ▲ mode, certificate, authorities
//	                      └── /system/run/apid ◀── Service, in PID 1
//
// Nothing in the gate grows without limit: connections, calls, headers, bodies,
// and what is buffered for a reader that is slow. What is not declared is denied.
package apid

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// ID of the service, and the argument with which PID 1's program becomes it.
	ID = "apid"
	// UID is the user and the group of the gate.
	UID = 50
)

// goMemory is from where on Go collects more often, in bytes: with 200 clients a
// third of it is garbage otherwise. Beyond it the gate goes on, only slower.
const goMemory = 28 << 20

// Main is the gate's process. It returns the exit status.
func Main() int {
	return runAt(boot.APIDir, sandbox.SocketPath, net.JoinHostPort("", strconv.Itoa(api.Port)))
}

func runAt(dir, socket, address string) int {
	return tlsserver.Process(goMemory, func(ctx context.Context, log *slog.Logger) error {
		g, err := newGate(dir, socket, log)
		if err != nil {
			return err
		}
		defer g.backend.CloseIdleConnections()
		defer background.Start(ctx, g.serveMetrics)()
		return g.server().Listen(ctx, address)
	})
}

// errClosed is the answer to all calls while the node is between its modes.
var errClosed = errors.New("the node has a configuration, but no certificate for its API yet")

// errUnsigned: see supervisor.withoutCertificate.
var errUnsigned = errors.New("no control plane has signed the certificate of the API yet")

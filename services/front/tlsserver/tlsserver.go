// Package tlsserver is a TLS server with limits, for clients that aren't
// authenticated yet. apid and trustd, which serve the network, use it.
//
// It takes TLS 1.3 only, and nothing in it grows without limit: connections, streams,
// headers, time, what is buffered for a reader that is slow, lines of the log. When all
// connections are in use, the host that has the most loses one to a new client. The
// handler decides which calls are allowed, and how many run at once.
package tlsserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// gcPercent: these programs live in the budget of the idle node. Their garbage is
	// short-lived, and collecting it twice as often costs a percent of a core.
	gcPercent = 50
	// maxProcs bounds the caches that Go's runtime keeps for each processor. Two do
	// more TLS handshakes in a second than a node has clients.
	maxProcs = 2

	// headerTimeout is for a TLS handshake, and for the header of a request.
	headerTimeout = 10 * time.Second
	// pingAfter and pingTimeout detect a client that is gone without closing.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second
	// HPACKTable is for each connection, both ways: our headers are short.
	HPACKTable = 4 << 10
	// uploadWindow bounds what of requests is buffered: for a stream, and as much
	// for its connection. A configuration is the only large one.
	uploadWindow = 64 << 10

	// stopBudget is for the calls that run when the server stops.
	stopBudget = 2 * time.Second
	// tick is how often Server.Tick is called.
	tick = time.Second
	// After freeAfter ticks without a call, memory is given back to the kernel; three
	// times, as what pools keep outlives two collections.
	freeAfter = 3
	freeUntil = freeAfter + 3
)

// Process sets up a program: its log, the signals that end it, its share of the
// machine. memory, in bytes, is Go's memory limit: garbage is collected more often
// beyond it. It returns the exit status.
func Process(memory int64, run func(ctx context.Context, log *slog.Logger) error) int {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memory)
	runtime.GOMAXPROCS(min(maxProcs, runtime.GOMAXPROCS(0)))
	// The log of the service has the time of each line.
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, log); err != nil {
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

// Server is what differs between apid and trustd.
type Server struct {
	Handler http.Handler
	Log     *slog.Logger // Limited
	Conns   *Conns
	// TLS returns the current configuration. With an error, every handshake fails.
	TLS func() (*tls.Config, error)
	// Read is for a whole request, Idle how long a connection without calls stays,
	// Stall how long a client may take nothing of an answer.
	Read, Idle, Stall time.Duration
	MaxHeader         int    // bytes
	MaxStreams        int    // for each connection
	Tick              func() // is called every second
}

// Listen serves at a TCP address until ctx ends.
func (s *Server) Listen(ctx context.Context, address string) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	return s.Serve(ctx, listener)
}

// Serve takes clients from listener until ctx ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	calls := &counter{Handler: s.Handler}
	server := s.http(calls)
	defer background.Start(context.WithoutCancel(ctx), func(ctx context.Context) { s.tickEverySecond(ctx, calls) })()
	return Until(ctx, server, stopBudget, func() error { return server.ServeTLS(&limited{listener, s.Conns}, "", "") })
}

// Until serves until ctx ends. Calls that run then have so much time for their end.
func Until(ctx context.Context, server *http.Server, budget time.Duration, serve func() error) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), budget)
		defer cancel()
		if server.Shutdown(ending) != nil {
			_ = server.Close()
		}
	})
	err := serve()
	if !stop() {
		<-stopped
	}
	if ctx.Err() != nil && errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	_ = server.Close()
	return fmt.Errorf("serve: %w", err)
}

func (s *Server) http(handler http.Handler) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	return &http.Server{
		Handler:   handler,
		Protocols: &protocols,
		TLSConfig: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			NextProtos:         []string{"h2", "http/1.1"},
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.TLS() },
		},
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       s.Read,
		IdleTimeout:       s.Idle,
		MaxHeaderBytes:    s.MaxHeader,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          s.MaxStreams,
			MaxReceiveBufferPerConnection: uploadWindow,
			MaxReceiveBufferPerStream:     uploadWindow,
			MaxDecoderHeaderTableSize:     HPACKTable,
			MaxEncoderHeaderTableSize:     HPACKTable,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
			WriteByteTimeout:              s.Stall,
		},
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, under(c))
		},
		ConnState: s.Conns.changed,
		ErrorLog:  log.New(Writer{s.Log}, "", 0),
	}
}

// counter counts calls.
type counter struct {
	http.Handler
	served  atomic.Uint64 // calls so far
	running atomic.Int32
}

func (c *counter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.served.Add(1)
	c.running.Add(1)
	defer c.running.Add(-1)
	c.Handler.ServeHTTP(w, r)
}

// tickEverySecond calls Tick, and gives memory back to the kernel when there are no
// calls.
func (s *Server) tickEverySecond(ctx context.Context, calls *counter) {
	var before uint64
	idleTicks := 0
	for sleep.For(ctx, tick) {
		s.Tick()
		if served := calls.served.Load(); served != before || calls.running.Load() > 0 {
			before, idleTicks = served, 0
			continue
		}
		if idleTicks = min(idleTicks+1, freeUntil); idleTicks >= freeAfter && idleTicks < freeUntil {
			debug.FreeOSMemory()
		}
	}
}

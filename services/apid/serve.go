package apid

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
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"
)

const (
	// headerTimeout is for a TLS handshake, and for the header of a request.
	headerTimeout = 10 * time.Second
	// readTimeout is for a whole request: 2 MiB over a slow line.
	readTimeout = time.Minute
	// idleTimeout is how long a connection without calls stays: a person at a
	// dashboard doesn't notice that it was made anew.
	idleTimeout = 2 * time.Minute
	// pingAfter and pingTimeout find out that a client is gone without a word.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second

	maxHeader = 16 << 10 // a message in a URL included
	// maxStreams is for each connection: gbctl and its dashboard have a dozen.
	maxStreams = 64
	// uploadWindow bounds what of requests is buffered: for a stream, and as much
	// for its connection. A configuration is the only large one.
	uploadWindow = 64 << 10
	// streamWindow bounds what PID 1 may send ahead of a reader that is slow. It is
	// per call, so that none waits for another: times maxCalls it is 12 MiB.
	streamWindow = 32 << 10
	// hpackTable is for each connection, both ways: our headers are short.
	hpackTable = 4 << 10

	// stopBudget is for the calls that run when the gate has to go.
	stopBudget = 2 * time.Second
	// tick is how often the housekeeper looks around.
	tick = time.Second
	// After quietFor ticks without a call, memory is given back to the kernel; three
	// times, as what pools keep outlives two collections.
	quietFor   = 3
	quietUntil = quietFor + 3
	// backendIdle lets go of the connection to PID 1, which costs both memory.
	backendIdle = 30 * time.Second
	dialTimeout = 5 * time.Second
)

// serve takes clients from listener until ctx ends.
func (g *gate) serve(ctx context.Context, listener net.Listener) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	server := &http.Server{
		Handler:   g,
		Protocols: &protocols,
		TLSConfig: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			NextProtos:         []string{"h2", "http/1.1"},
			GetConfigForClient: g.configFor,
		},
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReceiveBufferPerConnection: uploadWindow,
			MaxReceiveBufferPerStream:     uploadWindow,
			MaxDecoderHeaderTableSize:     hpackTable,
			MaxEncoderHeaderTableSize:     hpackTable,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
			WriteByteTimeout:              stallTimeout,
		},
		ConnContext: withConn,
		ConnState:   g.open.changed,
		ErrorLog:    log.New(logWriter{g.log}, "", 0),
	}
	hctx, stopHousekeeper := context.WithCancel(context.WithoutCancel(ctx))
	housekeeper := make(chan struct{})
	go func() {
		defer close(housekeeper)
		g.keepHouse(hctx)
	}()
	stopping := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopping)
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBudget)
		defer cancel()
		if server.Shutdown(sctx) != nil {
			_ = server.Close()
		}
	})
	err := server.ServeTLS(&limited{listener, &g.open}, "", "")
	if !stop() {
		<-stopping
	}
	stopHousekeeper()
	<-housekeeper
	g.backend.CloseIdleConnections()
	if ctx.Err() != nil && errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve the API: %w", err)
}

func (g *gate) configFor(*tls.ClientHelloInfo) (*tls.Config, error) {
	if s := g.state.Load(); s.tls != nil {
		return s.tls, nil
	}
	return nil, errClosed
}

// newBackend is the way to PID 1.
func newBackend(socket string) *http.Transport {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	dialer := net.Dialer{Timeout: dialTimeout}
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		},
		Protocols:              &protocols,
		DisableCompression:     true, // what is compressed is so by the caller's wish
		IdleConnTimeout:        backendIdle,
		MaxResponseHeaderBytes: maxHeader,
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: streamWindow,
			MaxDecoderHeaderTableSize: hpackTable,
			MaxEncoderHeaderTableSize: hpackTable,
		},
	}
}

// stamp tells one state.json from the next.
type stamp struct {
	inode    uint64
	size     int64
	modified time.Time
}

func stampOf(path string) (stamp, error) {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	s := stamp{size: info.Size(), modified: info.ModTime()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = sys.Ino
	}
	return s, nil
}

// refresh takes in what PID 1 has written, if that is new.
func (g *gate) refresh() (changed bool, err error) {
	at, err := stampOf(filepath.Join(g.dir, stateName))
	if err != nil || at == g.seen {
		return false, err
	}
	k, err := read(g.dir)
	if err != nil {
		return false, err
	}
	s, err := newState(k)
	if err != nil {
		return false, err
	}
	g.state.Store(s)
	g.seen = at
	g.log.Info("ready", "mode", s.mode)
	return true, nil
}

// keepHouse looks for what is new, ends connections of those who may no longer
// come in, and gives memory back when all is quiet.
func (g *gate) keepHouse(ctx context.Context) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	said := ""
	var before uint64
	quiet := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		why := ""
		if _, err := g.refresh(); err != nil {
			why = err.Error()
		}
		if why != "" && why != said {
			g.log.Warn("what PID 1 has written can't be used; going on with what was before", slog.String("err", why))
		}
		said = why
		g.open.sweep(g.state.Load(), g.now())
		if served := g.served.Load(); served != before || g.calls.Load() > 0 {
			before, quiet = served, 0
			continue
		}
		if quiet = min(quiet+1, quietUntil); quiet >= quietFor && quiet < quietUntil {
			debug.FreeOSMemory()
		}
	}
}

package apid

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"time"

	"github.com/garboard-os/garboard/services/front/tlsserver"
)

const (
	// readTimeout is for a whole request: 2 MiB over a slow line.
	readTimeout = time.Minute
	// idleTimeout is how long a connection without calls stays: a person at a
	// dashboard doesn't notice that it was made anew.
	idleTimeout = 2 * time.Minute

	maxHeader = 16 << 10 // a message in a URL included
	// maxStreams is for each connection: gbctl and its dashboard have a dozen.
	maxStreams = 64
	// streamWindow bounds what PID 1 may send ahead of a reader that is slow. It is
	// per call, so that none waits for another: times maxCalls it is 12 MiB.
	streamWindow = 32 << 10

	// backendIdle closes the idle connection to PID 1, which needs memory on both sides.
	backendIdle = 30 * time.Second
	dialTimeout = 5 * time.Second
)

// server is the gate behind its listener.
func (g *gate) server() *tlsserver.Server {
	return &tlsserver.Server{
		Handler: g, Log: g.log, Conns: &g.open, TLS: g.config,
		Read: g.piece, Idle: idleTimeout, Stall: stallTimeout,
		MaxHeader: maxHeader, MaxStreams: maxStreams,
		Tick: g.tick,
	}
}

func (g *gate) config() (*tls.Config, error) {
	if s := g.State(); s.tls != nil {
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
			MaxDecoderHeaderTableSize: tlsserver.HPACKTable,
			MaxEncoderHeaderTableSize: tlsserver.HPACKTable,
		},
	}
}

// tick loads a changed state, and closes connections of clients that are no longer
// allowed.
func (g *gate) tick() {
	g.watcher.Poll(g.log)
	s := g.State()
	g.sweep(&g.open, s, s.identify)
}

// sweep closes connections of clients that are no longer allowed.
func (g *gate) sweep(open *tlsserver.Conns, s *state, identify identifier) {
	now := g.time()
	open.Sweep(func(c *tlsserver.Conn, chain []*x509.Certificate) bool {
		caller, err := s.recall(c, chain, identify)
		return err == nil && caller.current(now) == nil && s.mode != modeClosed
	})
}

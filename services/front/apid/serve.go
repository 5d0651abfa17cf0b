package apid

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
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

// stallTimeout is how long a reader may take nothing at all of what is sent. A person who
// reads a log through a pager may pause for longer: the client and the kernels between keep
// some megabytes.
const stallTimeout = 2 * time.Minute

// steady ends an answer that its reader doesn't take. Servers have a timeout for a
// whole answer only, and following a log has no end.
type steady struct {
	http.ResponseWriter
	limit   time.Duration
	stalled *time.Timer
	pace    func(bytes int) // waits until more may be sent than these; nil: it needn't
}

func newSteady(w http.ResponseWriter, limit time.Duration) *steady {
	s := &steady{ResponseWriter: w, limit: limit, stalled: time.AfterFunc(limit, func() {
		// What is being written fails at once.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
	})}
	s.pause()
	return s
}

// pause stops the clock: nothing is being written.
func (s *steady) pause() { s.stalled.Stop() }

// Write implements http.ResponseWriter.
func (s *steady) Write(p []byte) (int, error) {
	s.stalled.Reset(s.limit)
	n, err := s.ResponseWriter.Write(p)
	s.pause()
	if s.pace != nil {
		s.pace(n)
	}
	return n, err
}

// FlushError is what http.ResponseController looks for.
func (s *steady) FlushError() error {
	s.stalled.Reset(s.limit)
	defer s.pause()
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// Unwrap is what http.ResponseController looks for.
func (s *steady) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// upload is a large request, which has a time for each piece of it to come: a server has
// one for the whole. While PID 1 is busy and doesn't read, no timeout runs: HTTP/2 would
// end the call for good.
type upload struct {
	io.ReadCloser
	control *http.ResponseController
	piece   time.Duration
}

func newUpload(w http.ResponseWriter, body io.ReadCloser, piece time.Duration) *upload {
	u := &upload{body, http.NewResponseController(w), piece}
	u.pause()
	return u
}

// pause stops the clock. An error means that there is no connection any more.
func (u *upload) pause() { _ = u.control.SetReadDeadline(time.Time{}) }

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	_ = u.control.SetReadDeadline(time.Now().Add(u.piece))
	defer u.pause()
	return u.ReadCloser.Read(p)
}

package logship

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/system/outbound"
)

const (
	openTimeout = 15 * time.Second
	// sendTimeout is for one batch.
	sendTimeout = 30 * time.Second
	// collectFor is how long lines are collected for an HTTP request.
	collectFor = time.Second
	// maxDatagram bounds the text of a line in a datagram, so that the line fits into one
	// even if JSON escapes every character, with all tags.
	maxDatagram = 8 << 10
)

var (
	errEnded = errors.New("the server has closed the connection")
	// errRefused: the server will not accept these lines at another attempt either.
	errRefused = errors.New("the server refuses the lines")
)

// transport is an open way to a server.
type transport interface {
	// send sends lines in their order. With an error, it returns how many have left.
	send(ctx context.Context, batch []logs.Record) (sent int, err error)
	// ended is closed when the server has closed the connection.
	ended() <-chan struct{}
	close()
}

// open opens the way to the server. ctx is for that, hard for what is sent.
func (d *destination) open(ctx, hard context.Context) (transport, error) {
	if strings.HasPrefix(d.Endpoint.Scheme, "http") {
		client, err := outbound.Transport(d.env)
		if err != nil {
			return nil, err
		}
		return &poster{d: d, transport: client}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	conn, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := connection{d: d, conn: conn, stop: context.AfterFunc(hard, func() { _ = conn.Close() })}
	if d.Endpoint.Scheme == "udp" {
		return &datagrams{c}, nil
	}
	c.gone = make(chan struct{})
	go func() {
		defer close(c.gone)
		// Servers send nothing; the end is the end of the connection.
		_, _ = io.Copy(io.Discard, conn)
	}()
	return &stream{c}, nil
}

func (d *destination) dial(ctx context.Context) (net.Conn, error) {
	if d.Endpoint.Scheme != "tls" {
		return new(net.Dialer).DialContext(ctx, d.Endpoint.Scheme, d.Endpoint.Host)
	}
	pool, err := outbound.Authorities(boot.CABundle, nil)
	if err != nil {
		return nil, err
	}
	dialer := tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}}
	return dialer.DialContext(ctx, "tcp", d.Endpoint.Host)
}

// collect is how long to wait for more lines before they are sent.
func (d *destination) collect() time.Duration {
	if strings.HasPrefix(d.Endpoint.Scheme, "http") {
		return collectFor
	}
	return 0
}

// encode is a line as the server expects it.
func (d *destination) encode(r logs.Record) []byte {
	if d.Format == config.LogRFC5424 {
		return rfc5424(r, d.host(), d.ExtraTags)
	}
	return jsonLine(r, d.host(), d.ExtraTags)
}

// connection is what streams and datagrams have in common.
type connection struct {
	d    *destination
	conn net.Conn
	gone chan struct{} // closed when the server has closed it; nil for datagrams
	stop func() bool
}

func (c *connection) ended() <-chan struct{} { return c.gone }

func (c *connection) close() {
	c.stop()
	_ = c.conn.Close() // what it had to send is sent, or will be sent again
	if c.gone != nil {
		<-c.gone
	}
}

// write writes before sendTimeout has passed.
func (c *connection) write(data []byte) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	_, err := c.conn.Write(data)
	return err
}

// stream is TCP or TLS.
type stream struct{ connection }

func (s *stream) send(_ context.Context, batch []logs.Record) (int, error) {
	var text bytes.Buffer
	for _, r := range batch {
		line := s.d.encode(r)
		if s.d.Format == config.LogRFC5424 {
			fmt.Fprintf(&text, "%d ", len(line)) // octet counting, RFC 6587 §3.4.1
			text.Write(line)
			continue
		}
		text.Write(line)
		text.WriteByte('\n')
	}
	if err := s.write(text.Bytes()); err != nil {
		return 0, err
	}
	return len(batch), nil
}

// datagrams is UDP: one message in each (RFC 5426).
type datagrams struct{ connection }

func (u *datagrams) send(_ context.Context, batch []logs.Record) (int, error) {
	for i, r := range batch {
		r.Message = r.Message[:min(len(r.Message), maxDatagram)]
		if err := u.write(u.d.encode(r)); err != nil {
			return i, err
		}
	}
	return len(batch), nil
}

// poster sends each batch in a request.
type poster struct {
	d         *destination
	transport *http.Transport
}

func (p *poster) ended() <-chan struct{} { return nil }
func (p *poster) close()                 { p.transport.CloseIdleConnections() }

func (p *poster) send(ctx context.Context, batch []logs.Record) (int, error) {
	var body bytes.Buffer
	for _, r := range batch {
		body.Write(p.d.encode(r))
		body.WriteByte('\n')
	}
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	// The URL comes later: an error would have it, and it may have a password.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "", &body)
	if err != nil {
		return 0, err
	}
	endpoint := p.d.Endpoint.URL
	if user := endpoint.User; user != nil {
		password, _ := user.Password()
		req.SetBasicAuth(user.Username(), password)
		endpoint.User = nil
	}
	req.URL = &endpoint
	req.Header.Set("Content-Type", "application/x-ndjson")
	// A redirect isn't followed: logs go to the configured server only.
	answer, err := p.transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	_, _ = io.CopyN(io.Discard, answer.Body, batchBytes) // so that the connection can be used again
	answer.Body.Close()
	switch code := answer.StatusCode; {
	case code/100 == 2:
		return len(batch), nil
	case code == http.StatusBadRequest, code == http.StatusRequestEntityTooLarge, code == http.StatusUnprocessableEntity:
		return 0, fmt.Errorf("%w: HTTP %s", errRefused, answer.Status)
	default:
		return 0, fmt.Errorf("the server answers HTTP %s", answer.Status)
	}
}

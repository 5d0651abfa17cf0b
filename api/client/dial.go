package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

const (
	// A node a continent away needs a second for TCP and TLS together, one that is
	// emulated and busy booting needs a few. Who hears nothing for that long is
	// told so, rather than left to wait for the kernel's two minutes.
	dialTimeout      = 7 * time.Second
	handshakeTimeout = 10 * time.Second

	// A stream has no deadline. Pings notice that its node has gone.
	pingAfter   = 15 * time.Second
	pingTimeout = 15 * time.Second
	// idleTimeout ends a connection whose last request was given up: it isn't idle yet when Close is called.
	idleTimeout = 30 * time.Second

	// maxMessage bounds one answer, so that a node can't fill our memory. All
	// resources of one type of a large cluster have a tenth of it.
	maxMessage = 32 << 20

	// stagger is the head start of each endpoint over the next one.
	stagger = 250 * time.Millisecond
)

// Client calls one node. It connects with the first call, and its calls may be
// made at the same time.
type Client struct {
	// Name is the node as it was asked for.
	Name string
	// Accepts decides about the node's certificate, once that was verified and before a
	// request is sent. It is set before the first call; nil accepts all.
	Accepts func(*x509.Certificate) error
	// Observe hears of each request once its answer begins, or doesn't come. It is set before the first call; nil:
	// nobody listens.
	Observe func(method, address string, took time.Duration, err error)

	Access    garboardv1connect.AccessServiceClient
	Config    garboardv1connect.ConfigServiceClient
	Etcd      garboardv1connect.EtcdServiceClient
	File      garboardv1connect.FileServiceClient
	Image     garboardv1connect.ImageServiceClient
	Log       garboardv1connect.LogServiceClient
	Node      garboardv1connect.NodeServiceClient
	Operation garboardv1connect.OperationServiceClient
	Resource  garboardv1connect.ResourceServiceClient
	Service   garboardv1connect.ServiceServiceClient

	address   string
	transport *http.Transport
	shown     atomic.Pointer[x509.Certificate]
}

// Dial makes a client for a node, by address or name, as the person of the
// context. The node must prove with a certificate of the context's authority
// that it has that very address or name.
func Dial(c *Context, node string) (*Client, error) {
	roots, own, err := c.Credentials()
	if err != nil {
		return nil, err
	}
	return dial(c, node, func(*Client) *tls.Config {
		return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}}
	})
}

// ErrFingerprint is why a node in maintenance mode isn't talked to: it shows
// another certificate than the one asked for.
var ErrFingerprint = errors.New("the certificate has another fingerprint")

// DialMaintenance makes a client for a node that has no configuration, and so no
// certificate that could prove who it is. fingerprint is that of the certificate
// on the node's console; without one, any certificate is believed: Shown tells
// which one it was. c may be nil; it says what way leads to the node, and whose
// certificate it takes to talk to a node whose kernel command line demands one.
func DialMaintenance(c *Context, node, fingerprint string) (*Client, error) {
	want := ""
	if fingerprint != "" {
		var err error
		if want, err = api.ParseFingerprint(fingerprint); err != nil {
			return nil, err
		}
	}
	var own []tls.Certificate
	if c != nil {
		if _, pair, err := c.Credentials(); err == nil {
			own = []tls.Certificate{pair}
		}
	}
	return dial(c, node, func(client *Client) *tls.Config {
		return &tls.Config{
			Certificates: own,
			// Nothing but the fingerprint can tell who this is.
			InsecureSkipVerify: true,
			VerifyConnection: func(state tls.ConnectionState) error {
				leaf := state.PeerCertificates[0]
				client.shown.Store(leaf)
				if want != "" && want != api.Fingerprint(leaf.Raw) {
					return fmt.Errorf("%w: %s, not %s", ErrFingerprint, Fingerprint(leaf), fingerprint)
				}
				return nil
			},
		}
	})
}

// Fingerprint is that of a certificate, as a node in maintenance mode shows its
// own on the console.
func Fingerprint(cert *x509.Certificate) string { return api.ShownFingerprint(cert.Raw) }

// Shown is the fingerprint of the certificate that the node has shown to
// DialMaintenance's client, "" before the first call.
func (c *Client) Shown() string {
	if cert := c.shown.Load(); cert != nil {
		return Fingerprint(cert)
	}
	return ""
}

// refusalWait is how long a node is given to say that it doesn't want us: it has
// all that it needs to decide after the handshake.
const refusalWait = 2 * time.Second

// Refusal connects once more and says nothing, in order to hear why the node
// closes connections: what it says about a client's certificate comes after the
// handshake, and is lost when a request is already on its way. Its result is nil
// where the node has nothing against us, or says nothing at all.
func (c *Client) Refusal(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, refusalWait)
	defer cancel()
	config := c.transport.TLSClientConfig.Clone()
	config.NextProtos = []string{"h2"}
	dialer := tls.Dialer{Config: config}
	conn, err := dialer.DialContext(ctx, "tcp", c.address)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return unlessClosed(err)
	}
	defer conn.Close()
	end, _ := ctx.Deadline()
	if err := conn.SetReadDeadline(end); err != nil {
		return err
	}
	if _, err = conn.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return unlessClosed(err)
}

// unlessClosed is nil for a connection that was closed without a word.
func unlessClosed(err error) error {
	if Closed(err) {
		return nil
	}
	return err
}

// Closed tells whether the other end has closed a connection and said nothing, as one does
// that goes down, and as what stands before a node does that is off.
func Closed(err error) bool {
	return slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE}, func(end error) bool { return errors.Is(err, end) })
}

// Close ends the connection. Calls under way go on.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

func dial(c *Context, node string, secure func(*Client) *tls.Config) (*Client, error) {
	host, address, err := Address(node)
	if err != nil {
		return nil, err
	}
	if c != nil {
		address = c.via(node, address)
	}
	client := &Client{Name: node, address: address}
	config := secure(client)
	config.MinVersion = tls.VersionTLS13
	config.ServerName = host
	verify := config.VerifyConnection
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if verify != nil {
			if err := verify(state); err != nil {
				return err
			}
		}
		if client.Accepts == nil {
			return nil
		}
		return client.Accepts(state.PeerCertificates[0])
	}
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	dialer := &net.Dialer{Timeout: dialTimeout}
	client.transport = &http.Transport{
		TLSClientConfig:     config,
		TLSHandshakeTimeout: handshakeTimeout,
		IdleConnTimeout:     idleTimeout,
		Protocols:           &protocols,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		// Nothing is between us and a node: no proxy of the environment either.
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, address)
		},
	}
	base := "https://" + net.JoinHostPort(host, strconv.Itoa(api.Port))
	httpClient := &http.Client{Transport: api.Former{RoundTripper: observed{client}}}
	limit := connect.WithReadMaxBytes(maxMessage)
	client.Access = garboardv1connect.NewAccessServiceClient(httpClient, base, limit)
	client.Config = garboardv1connect.NewConfigServiceClient(httpClient, base, limit)
	client.File = garboardv1connect.NewFileServiceClient(httpClient, base, limit)
	client.Image = garboardv1connect.NewImageServiceClient(httpClient, base, limit)
	client.Log = garboardv1connect.NewLogServiceClient(httpClient, base, limit)
	client.Etcd = garboardv1connect.NewEtcdServiceClient(httpClient, base, limit)
	client.Node = garboardv1connect.NewNodeServiceClient(httpClient, base, limit)
	client.Operation = garboardv1connect.NewOperationServiceClient(httpClient, base, limit)
	client.Resource = garboardv1connect.NewResourceServiceClient(httpClient, base, limit)
	client.Service = garboardv1connect.NewServiceServiceClient(httpClient, base, limit)
	return client, nil
}

// observed is the transport of a client that tells who observes it.
type observed struct{ *Client }

func (o observed) RoundTrip(r *http.Request) (*http.Response, error) {
	began := time.Now()
	response, err := o.transport.RoundTrip(r)
	if o.Observe != nil {
		o.Observe(r.URL.Path, o.address, time.Since(began), err)
	}
	return response, err
}

// Unary sends a request with a method of a client, and returns the message of the answer.
func Unary[Q, M any](ctx context.Context, method func(context.Context, *connect.Request[Q]) (*connect.Response[M], error), request *Q) (*M, error) {
	response, err := method(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

// Receive sends a request with a method of a client, and calls each for all messages of the
// stream that it returns.
func Receive[Q, M any](ctx context.Context, method func(context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[M], error), request *Q, each func(*M) error) error {
	stream, err := method(ctx, connect.NewRequest(request))
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		if err := each(stream.Msg()); err != nil {
			return err
		}
	}
	return stream.Err()
}

// Address parses a node as the user gives it: a name or an address, with or without a
// port. host must be in the certificate.
func Address(node string) (host, address string, err error) {
	host, port := node, strconv.Itoa(api.Port)
	bare := node
	if inside, ok := strings.CutPrefix(node, "["); ok && strings.HasSuffix(inside, "]") {
		bare = strings.TrimSuffix(inside, "]")
	}
	if ip, err := netip.ParseAddr(bare); err == nil {
		// A zone says which way leads there, on this machine alone.
		return ip.WithZone("").String(), net.JoinHostPort(ip.String(), port), nil
	}
	if node == "" || strings.ContainsAny(node, "/@ ;") {
		return "", "", fmt.Errorf("node %q: must be an address or a name, with or without a port; -n takes several, separated by commas", node)
	}
	if strings.Contains(node, ":") {
		if host, port, err = net.SplitHostPort(node); err != nil || host == "" {
			return "", "", fmt.Errorf("node %q: must be an address or a name, with or without a port", node)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", "", fmt.Errorf("node %q: %q isn't a port", node, port)
		}
	}
	address = net.JoinHostPort(host, port)
	if ip, err := netip.ParseAddr(host); err == nil {
		host = ip.WithZone("").String()
	}
	return host, address, nil
}

func (c *Context) via(node, address string) string {
	if via := c.Via[node]; via != "" {
		return via
	}
	return address
}

// Answering returns the first endpoint that accepts a connection. Endpoints earlier in
// the list have a head start. A single endpoint isn't checked.
func (c *Context) Answering(ctx context.Context, endpoints []string) (string, error) {
	if len(endpoints) == 1 {
		return endpoints[0], nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		endpoint string
		err      error
	}
	answers := make(chan answer, len(endpoints))
	for i, endpoint := range endpoints {
		go func() {
			answers <- answer{endpoint, c.try(ctx, endpoint, time.Duration(i)*stagger)}
		}()
	}
	var failed []error
	for range endpoints {
		a := <-answers
		if a.err == nil {
			return a.endpoint, nil
		}
		failed = append(failed, a.err)
	}
	return "", errors.Join(failed...)
}

func (c *Context) try(ctx context.Context, endpoint string, after time.Duration) error {
	select {
	case <-time.After(after):
	case <-ctx.Done():
		return ctx.Err()
	}
	_, address, err := Address(endpoint)
	if err != nil {
		return err
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", c.via(endpoint, address))
	if err != nil {
		return fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	return conn.Close()
}

// Package kubeclient is a small client of the Kubernetes API: JSON over HTTP with
// a client certificate or a bearer token, and the handful of verbs that a node
// needs. Objects are plain maps, so it fits every version of Kubernetes and
// drags in none of its libraries, which would double the size of PID 1.
//
// Where an object lives is found by discovery: one request for the aggregated
// document, kept until a kind is asked for that isn't in it.
package kubeclient

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// FieldManager is the name under which Garboard owns fields.
const FieldManager = "garboard"

const (
	// dialTimeout: the server is on this node or one hop away; what takes longer is down.
	dialTimeout = 5 * time.Second
	// maxCertFile bounds what is read of a certificate and its key.
	maxCertFile = 1 << 20
	// requestTimeout bounds one request other than a watch. The API server itself gives up after 60 s.
	requestTimeout = 30 * time.Second
	// idleTimeout closes kept connections, so that a client which is asked rarely doesn't hold one.
	idleTimeout = 30 * time.Second
	// pingAfter is how long a connection may be silent before it is asked whether it still
	// is one, and pingTimeout how long the answer may take: a peer that lost its power
	// doesn't say good-bye, and requests would wait for it in vain.
	pingAfter   = 15 * time.Second
	pingTimeout = 10 * time.Second
	// maxBody bounds an answer. The largest one asked for is the list of a node's pods, some KB for each of 110.
	maxBody = 64 << 20
)

// Options say where the API server is and who is asking.
type Options struct {
	Server     string // https://10.5.0.2:6443
	CA         []byte // PEM; what the server's certificate must be signed by
	ServerName string // what it must be issued for; "": the host of Server
	Cert, Key  []byte // PEM; a client certificate
	CertFile   string // or PEM file with both, read anew for each connection: the kubelet rotates its own
	Token      string // or a bearer token
	// Transport is for tests, which have no server: instead of all above but Server.
	Transport http.RoundTripper
}

// Client is safe for use by several goroutines.
type Client struct {
	server string
	token  string
	http   *http.Client

	mu       sync.Mutex // guards mappings
	mappings map[groupVersionKind]Mapping
}

// New makes a client. It doesn't connect.
func New(o Options) (*Client, error) {
	server, err := url.Parse(o.Server)
	if err != nil || server.Scheme != "https" || server.Host == "" {
		return nil, fmt.Errorf("kubernetes client: server %q isn't an https URL", o.Server)
	}
	if o.Transport != nil {
		return &Client{server: strings.TrimSuffix(o.Server, "/"), http: &http.Client{Transport: o.Transport}}, nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(o.CA) {
		return nil, errors.New("kubernetes client: no certificate in the CA")
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: o.ServerName}
	switch {
	case o.CertFile != "":
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			data, err := untrusted.ReadLinked(o.CertFile, maxCertFile)
			if err != nil {
				return nil, err
			}
			pair, err := tls.X509KeyPair(data, data)
			return &pair, err
		}
	case len(o.Cert) > 0:
		pair, err := tls.X509KeyPair(o.Cert, o.Key)
		if err != nil {
			return nil, fmt.Errorf("kubernetes client: client certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	transport := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     config,
		TLSHandshakeTimeout: requestTimeout, // under emulation a handshake takes seconds
		IdleConnTimeout:     idleTimeout,
		ForceAttemptHTTP2:   true,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
	}
	return &Client{server: strings.TrimSuffix(o.Server, "/"), token: o.Token, http: &http.Client{Transport: transport}}, nil
}

// Close drops idle connections. The client stays usable.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// request is one call of the API.
type request struct {
	method  string
	path    string
	sub     string // a subresource of the object, such as /eviction
	query   url.Values
	accept  string // "": JSON
	content string // content type of body; "": JSON
	body    Object // nil: none
}

// open sends r and returns the answer's body, which the caller closes, or a
// *StatusError.
func (c *Client) open(ctx context.Context, r request) (io.ReadCloser, error) {
	var body io.Reader
	if r.body != nil {
		data, err := json.Marshal(r.body)
		if err != nil {
			return nil, fmt.Errorf("encode body of %s %s: %w", r.method, r.path, err)
		}
		body = bytes.NewReader(data)
	}
	target := c.server + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, target, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", cmp.Or(r.accept, "application/json"))
	req.Header.Set("User-Agent", FieldManager)
	if body != nil {
		req.Header.Set("Content-Type", cmp.Or(r.content, "application/json"))
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= http.StatusOK && resp.StatusCode < http.StatusMultipleChoices {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, fmt.Errorf("%s %s: read answer: %w", r.method, r.path, err)
	}
	return nil, statusError(resp.StatusCode, text)
}

// A question is asked again, after a pause, if its connection breaks: the balancer does that with
// the connections to an API server that isn't ready any more, and then another one answers.
const (
	asks     = 3
	askPause = 200 * time.Millisecond
)

// read sends r and returns the answer.
func (c *Client) read(ctx context.Context, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for ask := 1; ; ask++ {
		data, err := c.readOnce(ctx, r)
		broke := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
		if !broke || r.method != http.MethodGet || ask == asks || !sleep.For(ctx, askPause) {
			return data, err
		}
	}
}

func (c *Client) readOnce(ctx context.Context, r request) ([]byte, error) {
	body, err := c.open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	data, err := io.ReadAll(io.LimitReader(body, maxBody+1))
	if err != nil {
		return nil, fmt.Errorf("%s %s: read answer: %w", r.method, r.path, err)
	}
	if len(data) > maxBody {
		return nil, fmt.Errorf("%s %s: answer is larger than %d MB", r.method, r.path, maxBody>>20)
	}
	return data, nil
}

// do sends r and decodes the answer into out, unless out is nil.
func (c *Client) do(ctx context.Context, r request, out any) error {
	data, err := c.read(ctx, r)
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("%s %s: decode answer: %w", r.method, r.path, err)
	}
	return nil
}

// Text is what the server answers to a GET of path, as it is: /metrics.
func (c *Client) Text(ctx context.Context, path string) (string, error) {
	data, err := c.read(ctx, request{method: http.MethodGet, path: path, accept: "*/*"})
	return string(data), err
}

// Raw is what the server answers to a GET of path, for everything that isn't an
// object: /readyz, or a kubelet's /pods.
func (c *Client) Raw(ctx context.Context, path string) (Object, error) {
	var o Object
	return o, c.do(ctx, request{method: http.MethodGet, path: path}, &o)
}

// Ready is nil once the API server serves: /readyz.
func (c *Client) Ready(ctx context.Context) error {
	return c.do(ctx, request{method: http.MethodGet, path: "/readyz", accept: "*/*"}, nil)
}

// Kept is a client that stays the same as long as its options do, for what it has learnt of the API.
type Kept struct {
	*Client // nil: none yet
	with    Options
}

// Use makes the client, unless it has these options.
func (k *Kept) Use(o Options) error {
	if k.Client != nil && reflect.DeepEqual(o, k.with) {
		return nil
	}
	client, err := New(o)
	if err == nil {
		k.Close()
		k.Client, k.with = client, o
	}
	return err
}

// Close closes the connections of the client, if there is one.
func (k *Kept) Close() {
	if k.Client != nil {
		k.Client.Close()
	}
}

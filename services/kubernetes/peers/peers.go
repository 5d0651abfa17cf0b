// Package peers calls the machine API of other nodes, for operations that concern more
// than one. Each call has a deadline.
//
// The client certificate has the role os:peer and is valid for an hour. The node makes it
// with the authority's key, which only control planes have: a worker calls nobody. Which
// methods a peer may call is in the .proto files.
package peers

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// validity of a certificate. It is replaced at half of it: that leaves more than any
	// call takes, and more than the clocks of two nodes may differ.
	validity = time.Hour
	renewAt  = validity / 2

	// dialTimeout: a machine that is off must not keep the caller from the other nodes.
	dialTimeout = 3 * time.Second
	// callTimeout of a call, from the dial to the answer. A node that is busy booting, under
	// emulation, takes ten seconds for it.
	callTimeout = 30 * time.Second
	// A node that is gone without a word is noticed by pings.
	pingAfter   = 15 * time.Second
	pingTimeout = 15 * time.Second

	// idleTimeout ends a connection without calls, and maxIdle bounds them. A node has one,
	// as its calls share it.
	idleTimeout = 30 * time.Second
	maxIdle     = 16
	// maxAnswer bounds an answer: all resources of one type have a tenth of it.
	maxAnswer = 4 << 20
)

// Client calls other nodes. Its calls may be made at the same time.
type Client struct {
	// Now is time.Now; tests have a clock of their own.
	Now func() time.Time

	store   resource.Reader
	timeout time.Duration // callTimeout; a field for tests

	mu      sync.Mutex // guards session
	session *session
}

// New makes the client of the node with this store.
func New(store resource.Reader) *Client {
	return &Client{store: store, Now: time.Now, timeout: callTimeout}
}

// Close ends connections without calls. The client can be used further.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session != nil {
		c.session.close()
	}
}

// Check says why this node can't call others, such as a worker.
func (c *Client) Check() error {
	_, err := c.current()
	return err
}

// session is a certificate, and the connections that were made with it.
type session struct {
	node      string
	endpoint  string
	issuing   config.PEM
	trusted   config.PEM
	began     time.Time
	transport *http.Transport
	control   *http.Transport // for control planes only
}

func (s *session) close() {
	s.transport.CloseIdleConnections()
	s.control.CloseIdleConnections()
}

// current is the session for a new call. Calls under way end with the one that they began
// with.
func (c *Client) current() (*session, error) {
	cfg, err := configuration.Config(c.store)
	hostname, none := network.Hostnames.Get(c.store, network.HostnameID)
	if err = cmp.Or(err, none); err != nil {
		return nil, err
	}
	ca, trusted, now, endpoint := cfg.Machine.CA, cfg.Machine.TrustedCAs(), c.Now(), cfg.Cluster.ControlPlane.Endpoint.Hostname()
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.session
	if old != nil && old.node == hostname.Spec && old.endpoint == endpoint && bytes.Equal(old.issuing, ca.Crt) && bytes.Equal(old.trusted, trusted) && !now.Before(old.began) && now.Round(0).Sub(old.began) < renewAt {
		return old, nil
	}
	if c.session, err = newSession(ca, trusted, hostname.Spec, endpoint, now); err != nil {
		c.session = old
		return nil, err
	}
	if old != nil {
		old.close()
	}
	return c.session, nil
}

var errNoKey = errors.New("this node doesn't have the key of the machine API's authority (machine.ca.key): only control planes call other nodes")

func newSession(ca config.CertKey, trusted config.PEM, node, endpoint string, now time.Time) (*session, error) {
	if len(ca.Key) == 0 {
		return nil, errNoKey
	}
	crt, key, err := ca.CA().Issue(pki.Leaf{CN: node, Orgs: []string{string(api.Peer)}, Client: true, Validity: validity, Now: now})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		return nil, fmt.Errorf("certificate as a peer: %w", err)
	}
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	s := &session{node: node, endpoint: endpoint, issuing: ca.Crt, trusted: trusted, began: now.Round(0), transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pki.Pool(trusted), Certificates: []tls.Certificate{pair}},
		TLSHandshakeTimeout: callTimeout,
		Protocols:           &protocols,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		IdleConnTimeout:     idleTimeout,
		MaxIdleConns:        maxIdle,
	}}
	// A worker can say in Kubernetes that its address is that of a control plane, and has a certificate for the
	// address. Only the certificates of control planes have the name of the cluster's endpoint.
	s.control = s.transport.Clone()
	s.control.TLSClientConfig.VerifyConnection = func(c tls.ConnectionState) error {
		if err := c.PeerCertificates[0].VerifyHostname(endpoint); err != nil {
			return fmt.Errorf("it isn't a control plane: %w", err)
		}
		return nil
	}
	return s, nil
}

// frame holds a message of any type. An instance of connect's client for each type would
// add 30 KB each to PID 1.
type frame struct{ proto.Message }

// frames is connect's codec for them.
type frames struct{}

func (frames) Name() string { return "proto" }

func (frames) Marshal(message any) ([]byte, error) { return proto.Marshal(message.(*frame).Message) }

func (frames) Unmarshal(data []byte, message any) error {
	return proto.Unmarshal(data, message.(*frame).Message)
}

// dial is a client of one method of a node, whose answers are of the type of res.
func (s *session) dial(through *http.Transport, node netip.Addr, procedure string, res proto.Message) *connect.Client[frame, frame] {
	url := "https://" + netip.AddrPortFrom(node, api.Port).String() + procedure
	// A worker must not send the call, with the certificate of a peer, to another node.
	asks := &http.Client{Transport: api.Former{RoundTripper: through}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return connect.NewClient[frame, frame](asks, url, connect.WithCodec(frames{}), connect.WithReadMaxBytes(maxAnswer),
		connect.WithResponseInitializer(func(_ connect.Spec, message any) error {
			message.(*frame).Message = res
			return nil
		}))
}

// call calls a method with one answer, which is written to res.
func (c *Client) call(ctx context.Context, node netip.Addr, procedure string, req, res proto.Message) error {
	s, err := c.current()
	if err != nil {
		return failed(node, procedure, err)
	}
	return c.callBy(ctx, s, s.transport, node, procedure, req, res)
}

func (c *Client) callBy(ctx context.Context, s *session, through *http.Transport, node netip.Addr, procedure string, req, res proto.Message) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	_, err := s.dial(through, node, procedure, res).CallUnary(ctx, connect.NewRequest(&frame{req}))
	return failed(node, procedure, err)
}

// stream calls a method with many answers. Each one is written to res before each is
// called. It ends after most, and if the node says nothing for as long as a call may take.
func (c *Client) stream(ctx context.Context, node netip.Addr, procedure string, most time.Duration, req, res proto.Message, each func()) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	silent := time.AfterFunc(c.timeout, cancel)
	defer silent.Stop()
	s, err := c.current()
	if err != nil {
		return failed(node, procedure, err)
	}
	answers, err := s.dial(s.transport, node, procedure, res).CallServerStream(ctx, connect.NewRequest(&frame{req}))
	if err == nil {
		for answers.Receive() {
			silent.Reset(c.timeout)
			each()
		}
		err = answers.Err()
		_ = answers.Close() // after the last answer, or after an error that says more
	}
	if err != nil && !silent.Stop() {
		err = connect.NewError(connect.CodeDeadlineExceeded, fmt.Errorf("the node said nothing for %s", c.timeout))
	}
	return failed(node, procedure, err)
}

// failed names the call, and keeps the code.
func failed(node netip.Addr, procedure string, err error) error {
	if err == nil {
		return nil
	}
	next := ""
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded:
		next = fmt.Sprintf("; look at that node: gbctl -n %s services", node)
	}
	return fmt.Errorf("call %s of node %s: %w%s", strings.TrimPrefix(procedure, "/garboard.v1."), node, err, next)
}

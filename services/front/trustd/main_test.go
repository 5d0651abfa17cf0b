package trustd

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

const token = "abcdef.0123456789abcdef"

var (
	worker       = netip.MustParseAddr("192.0.2.20")
	controlPlane = netip.MustParseAddr("192.0.2.2")
)

// logBuffer is the log of trustd.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// elsewhere is a listener to which everybody comes from another address than that of
// this machine.
type elsewhere struct {
	net.Listener
	peer *atomic.Pointer[netip.Addr]
}

type from struct {
	net.Conn
	peer netip.Addr
}

func (e elsewhere) Accept() (net.Conn, error) {
	c, err := e.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return from{c, *e.peer.Load()}, nil
}

func (f from) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(f.peer, 40000))
}

// bench is a trustd in this process.
type bench struct {
	token   string // machine.token
	dir     string
	ca      pki.CA
	policy  policy
	server  *server
	log     *logBuffer
	address string
	peer    atomic.Pointer[netip.Addr] // of those who come
}

func newCA(t testing.TB) pki.CA {
	t.Helper()
	ca, err := pki.NewMachineCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// controlPlaneState is what PID 1 of a control plane writes.
func controlPlaneState(t testing.TB, ca pki.CA) facts {
	t.Helper()
	cert, key, err := ca.Issue(pki.Leaf{CN: "cp-1", DNS: []string{"cp-1", "localhost", "cluster.example.org"}, IPs: []netip.Addr{controlPlane, netip.MustParseAddr("127.0.0.1")}, Server: true, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	return facts{Cert: cert, Key: key}
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{token: token, dir: t.TempDir(), ca: newCA(t), log: new(logBuffer)}
	b.peer.Store(&worker)
	state := controlPlaneState(t, b.ca)
	b.policy = newPolicy(parse(t, state.Cert), config.ClusterNetwork{PodSubnets: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}})
	b.write(t, state)
	var err error
	if b.server, err = newServer(b.dir, "", slog.New(slog.NewTextHandler(b.log, nil))); err != nil {
		t.Fatal(err)
	}
	b.server.sign = b.issue
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.address = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.server.listener().Serve(ctx, elsewhere{listener, &b.peer}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

// issue is PID 1's side, for a name that is free.
func (b *bench) issue(_ context.Context, msg *apiv1.SignRequest, peer netip.Addr) ([]byte, error) {
	if !(roster.Facts{Now: time.Now()}).Admits(msg.GetToken(), b.token) && len(msg.GetProof()) == 0 {
		return nil, connect.NewError(connect.CodeUnauthenticated, errToken)
	}
	public, leaf, err := b.policy.check(msg.GetRequest(), peer)
	if err != nil {
		return nil, connect.NewError(connect.CodePermissionDenied, err)
	}
	leaf.Now = b.server.now()
	return b.ca.Sign(public, leaf)
}

func (b *bench) write(t testing.TB, f facts) {
	t.Helper()
	if err := statefile.Write(b.dir, os.Getuid(), f); err != nil {
		t.Fatal(err)
	}
}

// client makes one connection for each call: the address is the connection's.
func (b *bench) client(t testing.TB) *http.Client {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(b.ca.Cert)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func (b *bench) sign(t testing.TB, token string, request []byte, options ...connect.ClientOption) ([]byte, error) {
	t.Helper()
	return b.ask(t, &apiv1.SignRequest{Token: token, Request: request}, options...)
}

func (b *bench) ask(t testing.TB, msg *apiv1.SignRequest, options ...connect.ClientOption) ([]byte, error) {
	t.Helper()
	client := garboardv1connect.NewTrustServiceClient(b.client(t), "https://"+b.address, options...)
	answer, err := client.Sign(t.Context(), connect.NewRequest(msg))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetCertificate(), nil
}

// from makes the next connections come from addr.
func (b *bench) from(addr string) {
	peer := netip.MustParseAddr(addr)
	b.peer.Store(&peer)
}

// leaf is what a node that means well asks for.
func leaf() pki.Leaf {
	return pki.Leaf{CN: "worker-1", DNS: []string{"worker-1", "localhost"}, IPs: append([]netip.Addr{worker}, loopback...)}
}

func request(t testing.TB, alg pki.Algorithm, leaf pki.Leaf) []byte {
	t.Helper()
	key, err := pki.NewKey(alg)
	if err != nil {
		t.Fatal(err)
	}
	text, err := pki.NewRequest(key, leaf)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func parse(t testing.TB, text []byte) *x509.Certificate {
	t.Helper()
	cert, err := pki.ParseCert(text)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// wantRefused checks an error's code and text.
func wantRefused(t testing.TB, err error, code connect.Code, texts ...string) {
	t.Helper()
	if connect.CodeOf(err) != code || err == nil {
		t.Errorf("%v, want %s", err, code)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %s in it", err, text)
		}
	}
}

func numbered(i int) string { return fmt.Sprintf("198.51.%d.%d", i/250, i%250+1) }

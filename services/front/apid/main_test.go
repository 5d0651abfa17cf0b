package apid

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// settings are what a test writes for the gate.
type settings struct {
	mode      string
	pinnedCA  string
	metrics   string
	bundle    []byte
	cert      []byte
	key       []byte
	metricsCA []byte
	floor     time.Time
}

func (s settings) facts() facts {
	return facts{
		Mode: s.mode, PinnedCA: s.pinnedCA, Metrics: s.metrics, Floor: s.floor,
		Authorities: s.bundle, Cert: s.cert, Key: s.key, MetricsCA: s.metricsCA,
	}
}

// gateVariable, in the environment, makes the test program the gate itself: its
// value is the directory, the socket and the address.
const gateVariable = "GARBOARD_TEST_APID"

func TestMain(m *testing.M) {
	if dir := os.Getenv(gateVariable); dir != "" {
		os.Exit(gateProcess(dir))
	}
	if where := os.Getenv(hostileVariable); where != "" {
		os.Exit(hostile(where))
	}
	os.Exit(m.Run())
}

// recorder is PID 1's side of the API, which answers everything, and remembers
// what it was asked.
type recorder struct {
	server *http.Server
	// handler answers when it isn't nil.
	handler http.Handler
	forget  bool // that is, don't remember
	close   func()

	mu       sync.Mutex // guards all following fields
	requests []*http.Request
	refusals []api.Refusal
}

func (r *recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == api.Refusals {
		var told api.Refusal
		if err := json.NewDecoder(req.Body).Decode(&told); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.refusals = append(r.refusals, told)
		return
	}
	if !r.forget {
		r.mu.Lock()
		r.requests = append(r.requests, req)
		r.mu.Unlock()
	}
	if r.handler != nil {
		r.handler.ServeHTTP(w, req)
		return
	}
	_, _ = io.Copy(io.Discard, req.Body)
}

// refused is the last call that the gate told of as refused, and how many there were.
func (r *recorder) refused() (last api.Refusal, count int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if count = len(r.refusals); count > 0 {
		last = r.refusals[count-1]
	}
	return last, count
}

// take returns the requests so far, and forgets them.
func (r *recorder) take() []*http.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.requests
	r.requests = nil
	return taken
}

func newRecorder(t testing.TB, socket string, handler http.Handler) *recorder {
	t.Helper()
	r := &recorder{handler: handler}
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	protocols.SetHTTP1(true)
	r.server = &http.Server{Handler: r, Protocols: &protocols}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { _ = r.server.Serve(listener); close(served) }()
	// A listener takes its socket's name with it, be it another's by then: who
	// listens there next must come after its end.
	r.close = sync.OnceFunc(func() {
		r.server.Close()
		listener.Close()
		<-served
	})
	t.Cleanup(r.close)
	return r
}

// bench is a gate with what is around it.
type bench struct {
	dir, socket, address string
	gate                 *gate
	log                  *logBuffer
	backend              *recorder
}

// logBuffer is the log of the gate.
type logBuffer struct {
	mu   sync.Mutex
	text []byte
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = append(b.text, p...)
	return len(p), nil
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.text)
}

func newCA(t testing.TB) pki.CA {
	t.Helper()
	ca, err := pki.NewMachineCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// normal is what PID 1 writes for a configured node.
func normal(t testing.TB, ca pki.CA, more ...pki.CA) settings {
	t.Helper()
	cert, key, err := ca.Issue(pki.Leaf{CN: "n1", DNS: []string{"localhost"}, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Server: true, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	bundle := ca.Cert
	for _, other := range more {
		bundle = append(bundle[:len(bundle):len(bundle)], other.Cert...)
	}
	return settings{mode: api.ModeNormal, bundle: bundle, cert: cert, key: key}
}

func maintenance(t testing.TB, pinned string) settings {
	t.Helper()
	s, err := newSelf(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return settings{mode: api.ModeMaintenance, pinnedCA: pinned, cert: s.cert, key: s.key}
}

// newBench starts a gate in this process that goes by k.
func newBench(t testing.TB, k settings, handler http.Handler) *bench {
	t.Helper()
	b := prepareBench(t, k, handler)
	b.listen(t)
	return b
}

func (b *bench) listen(t testing.TB) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.serve(t, listener)
}

func prepareBench(t testing.TB, k settings, handler http.Handler) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{dir: filepath.Join(dir, "apid"), socket: filepath.Join(dir, "machine.sock"), log: new(logBuffer)}
	b.write(t, k)
	b.backend = newRecorder(t, b.socket, handler)
	var err error
	if b.gate, err = newGate(b.dir, b.socket, slog.New(slog.NewTextHandler(b.log, nil))); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bench) serve(t testing.TB, listener net.Listener) {
	t.Helper()
	b.address = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	server := b.gate.server()
	go func() { done <- server.Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		b.gate.backend.CloseIdleConnections()
	})
}

// write writes k as PID 1 does.
func (b *bench) write(t testing.TB, k settings) {
	t.Helper()
	if err := statefile.Write(b.dir, os.Getuid(), k.facts()); err != nil {
		t.Fatal(err)
	}
}

// written is what is there for the gate.
func (b *bench) written(t testing.TB) (f facts) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(b.dir, statefile.StateName))
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// writeAndWait writes k, and waits until the gate uses it.
func (b *bench) writeAndWait(t testing.TB, k settings) {
	t.Helper()
	before := b.gate.State() // the gate looks by itself, too, and may be quicker than we
	b.write(t, k)
	eventually.That(t, 10*time.Second, "the gate to take in what was written", func() error {
		if b.gate.State() == before {
			return os.ErrDeadlineExceeded
		}
		return nil
	})
}

// shown is a client certificate, with those that are sent after it.
func shown(t testing.TB, ca pki.CA, leaf pki.Leaf, more ...[]byte) *tls.Certificate {
	t.Helper()
	if leaf.Now.IsZero() {
		leaf.Now = time.Now()
	}
	if !leaf.Server {
		leaf.Client = true
	}
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range more {
		cert = append(cert, m...)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return &pair
}

// admin is a certificate that may do everything.
func admin(t testing.TB, ca pki.CA) *tls.Certificate {
	return shown(t, ca, pki.Leaf{CN: "alice", Orgs: []string{string(api.Admin)}})
}

// client talks to the gate with a certificate, or none.
func (b *bench) client(t testing.TB, cert *tls.Certificate, http2 bool) *http.Client {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: clientTLS(cert), Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP2(http2)
	transport.Protocols.SetHTTP1(!http2)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func clientTLS(cert *tls.Certificate) *tls.Config {
	c := &tls.Config{InsecureSkipVerify: true}
	if cert != nil {
		// Whatever the server says that it takes.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	}
	return c
}

func (b *bench) url(path string) string { return "https://" + b.address + path }

func parse(t testing.TB, pem []byte) *x509.Certificate {
	t.Helper()
	cert, err := pki.ParseCert(pem)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func signer(c *tls.Certificate) crypto.Signer { return c.PrivateKey.(crypto.Signer) }

// gateProcess is Main with its places from the environment.
func gateProcess(places string) int {
	f := strings.Fields(places)
	return runAt(f[0], f[1], f[2])
}

var discard = slog.New(slog.DiscardHandler)

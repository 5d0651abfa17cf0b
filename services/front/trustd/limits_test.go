package trustd

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// Without the token there is nothing, and nothing of it is told.
func TestWrongToken(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	good := request(t, pki.Ed25519, leaf())
	for _, wrong := range []string{"", token[:len(token)-1], token + "0", strings.ToUpper(token), "abcdef.0123456789abcdeg", strings.Repeat("x", 4<<10)} {
		_, err := b.sign(t, wrong, good)
		wantRefused(t, err, connect.CodeUnauthenticated, "the token is neither machine.token of this control plane nor one of gbctl token create that still counts")
	}
	if text := b.log.String(); strings.Contains(text, "012345") || strings.Contains(text, "signed") {
		t.Errorf("the log says %s", text)
	}
	// What is wrong with the request isn't told to them either.
	_, err := b.sign(t, "x", []byte("nothing"))
	wantRefused(t, err, connect.CodeUnauthenticated)
}

// An address that asks and asks is told to wait; the others aren't.
func TestTooMany(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var mu sync.Mutex
	now := time.Now()
	b.server.now = func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	good := request(t, pki.Ed25519, leaf())
	for i := range perAddress.burst {
		if _, err := b.sign(t, "x", good); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Fatalf("%d: %v", i, err)
		}
	}
	_, err := b.sign(t, token, good)
	wantRefused(t, err, connect.CodeResourceExhausted, "192.0.2.20 asks too often; try again in 5s")
	b.from("192.0.2.21")
	other := leaf()
	other.IPs[0] = netip.MustParseAddr("192.0.2.21")
	if _, err := b.sign(t, token, request(t, pki.Ed25519, other)); err != nil {
		t.Error(err)
	}
	b.from("192.0.2.20")
	mu.Lock()
	now = now.Add(perAddress.every)
	mu.Unlock()
	if _, err := b.sign(t, token, good); err != nil {
		t.Error(err)
	}
	if _, err = b.sign(t, token, good); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	var l limits
	now := time.Now()
	ask := func(addr string, want bool) {
		t.Helper()
		if _, ok := l.take(netip.MustParseAddr(addr), now); ok != want {
			t.Errorf("%s: %v", addr, ok)
		}
	}
	// A host that asks and asks keeps out nobody else of its LAN,
	for range perAddress.burst {
		ask("2001:db8::1", true)
	}
	for range 2 * perSite.burst {
		ask("2001:db8::1", false)
	}
	// which has a limit of its own: all of a host's IPv6 addresses are in it,
	for i := range perSite.burst - perAddress.burst {
		ask(fmt.Sprintf("2001:db8::1:%x", i), true)
	}
	ask("2001:db8::ffff", false)
	ask("2001:db8:0:1::1", true)
	now = now.Add(perSite.every)
	ask("2001:db8::ffff", true)
	ask("2001:db8::ffff", false)
	// and which leaves connections to others.
	for _, r := range []rate{perAddress, perSite} {
		if calls := r.burst + int(callTimeout/r.every); calls > maxConns/3 {
			t.Errorf("%d connections of %d", calls, maxConns)
		}
	}
	// What is kept has a bound, and who was last here is kept.
	now = now.Add(time.Second)
	for range perAddress.burst {
		ask("192.0.2.20", true)
	}
	for i := range 2*maxBuckets - 1 {
		if i%(maxBuckets/2) == 0 {
			now = now.Add(time.Second)
			ask("192.0.2.20", false)
		}
		ask(numbered(i), true)
	}
	if n := len(l.buckets); n > maxBuckets {
		t.Errorf("%d addresses are kept", n)
	}
	// A clock that is set back keeps nobody out for longer.
	now = now.Add(-time.Hour)
	for range perAddress.burst + 1 {
		l.take(netip.MustParseAddr("203.0.113.1"), now)
	}
	if wait, ok := l.take(netip.MustParseAddr("203.0.113.1"), now.Add(-time.Hour)); ok || wait > perAddress.every {
		t.Errorf("%v, %s", ok, wait)
	}
	now = now.Add(-time.Hour + perAddress.every)
	ask("203.0.113.1", true)
}

// A request that somebody has seen is worth nothing from elsewhere, and from its own
// address it makes a certificate for a key that they don't have. What went over the
// line can't be sent again.
func TestReplay(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	seen := request(t, pki.Ed25519, leaf())
	first, err := b.sign(t, token, seen)
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.sign(t, token, seen)
	if err != nil {
		t.Fatal(err)
	}
	key, ok := parse(t, first).PublicKey.(interface{ Equal(any) bool })
	if ok && !key.Equal(parse(t, second).PublicKey) || bytes.Equal(first, second) {
		t.Error("the second certificate is for another key, or the first one again")
	}
	b.from("192.0.2.66")
	_, err = b.sign(t, token, seen)
	wantRefused(t, err, connect.CodePermissionDenied, "192.0.2.66")

	b.from("192.0.2.20")
	before := strings.Count(b.log.String(), "msg=signed")
	line := record(t, b, seen)
	conn, err := net.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(line); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, conn) // until it is refused
	if n := strings.Count(b.log.String(), "msg=signed") - before; n != 1 {
		t.Errorf("%d were signed", n)
	}
}

// recorder keeps what is sent.
type recorder struct {
	net.Conn
	sent *logBuffer
}

func (r recorder) Write(p []byte) (int, error) {
	_, _ = r.sent.Write(p)
	return r.Conn.Write(p)
}

// record is what a worker sends for its certificate.
func record(t *testing.T, b *bench, request []byte) []byte {
	t.Helper()
	sent := new(logBuffer)
	client := b.client(t)
	client.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return recorder{conn, sent}, err
	}
	trust := garboardv1connect.NewTrustServiceClient(client, "https://"+b.address)
	if _, err := trust.Sign(t.Context(), connect.NewRequest(&apiv1.SignRequest{Token: token, Request: request})); err != nil {
		t.Fatal(err)
	}
	return []byte(sent.String())
}

// Strangers get no further than TLS and one procedure, and keep nobody out.
func TestMaliciousClients(t *testing.T) {
	t.Parallel()
	began := time.Now()
	b := newBench(t)
	procedure := "https://" + b.address + garboardv1connect.TrustServiceSignProcedure
	for range 2 * maxNew { // who say nothing
		conn, err := net.Dial("tcp", b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	for _, text := range []string{"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\xff\xff", strings.Repeat("\x00", 1<<16)} {
		conn, err := net.Dial("tcp", b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, text) // it may be refused before the end
	}
	if _, err := tls.Dial("tcp", b.address, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}); err == nil {
		t.Error("TLS 1.2 is spoken")
	}
	var bomb bytes.Buffer
	w := gzip.NewWriter(&bomb)
	_, _ = w.Write(make([]byte, 4<<20))
	w.Close()
	for _, tt := range []struct {
		name, method, url string
		header            http.Header
		body              io.Reader
		want              int
	}{
		{"a large body", http.MethodPost, procedure, http.Header{"Content-Type": {"application/json"}}, bytes.NewReader(make([]byte, 1<<20)), http.StatusTooManyRequests},
		{"a body that has no end", http.MethodPost, procedure, http.Header{"Content-Type": {"application/json"}}, io.LimitReader(zeros{}, 64<<20), http.StatusTooManyRequests},
		{"a bomb", http.MethodPost, procedure, http.Header{"Content-Type": {"application/proto"}, "Content-Encoding": {"gzip"}}, &bomb, http.StatusTooManyRequests},
		{"a large header", http.MethodPost, procedure, http.Header{"X": {strings.Repeat("x", 64<<10)}}, nil, http.StatusRequestHeaderFieldsTooLarge},
		{"not JSON", http.MethodPost, procedure, http.Header{"Content-Type": {"application/json"}}, strings.NewReader("{"), http.StatusBadRequest},
		{"GET", http.MethodGet, procedure, nil, nil, http.StatusMethodNotAllowed},
		{"the machine API", http.MethodPost, "https://" + b.address + api.Methods()[0].Procedure, nil, nil, http.StatusNotFound},
		{"profiles", http.MethodGet, "https://" + b.address + "/debug/pprof/", nil, nil, http.StatusNotFound},
	} {
		r, err := http.NewRequestWithContext(t.Context(), tt.method, tt.url, tt.body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = tt.header
		resp, err := b.client(t).Do(r)
		if err != nil {
			// It hung up while the rest came.
			continue
		}
		resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("%s: %s", tt.name, resp.Status)
		}
	}
	if _, err := b.sign(t, token, request(t, pki.ECDSA, leaf())); err != nil {
		t.Error(err)
	}
	if n := b.server.conns.Len(); n > maxConns {
		t.Errorf("%d connections are open", n)
	}
	// Twenty at once, one more each second, and what isn't of strangers.
	if n := strings.Count(b.log.String(), "\n"); n > 40+int(time.Since(began)/time.Second) {
		t.Errorf("the log has %d lines", n)
	}
	eventually.That(t, 5*time.Second, "the calls to be over", func() error {
		if n := b.server.calls.Load(); n != 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// Strangers whose calls never come to their end have a few of them each, and the others
// are answered as ever.
func TestSlowBodies(t *testing.T) {
	t.Parallel()
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprint("HTTP/2 ", http2), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			for i := range 2 * maxCalls / perAddress.burst {
				b.from(numbered(i))
				b.slowly(t, perAddress.burst+2, http2)
			}
			b.from(worker.String())
			if _, err := b.sign(t, token, request(t, pki.ECDSA, leaf())); err != nil {
				t.Error(err)
			}
		})
	}
}

// slowly makes calls whose body doesn't come, and returns once each of them has begun, or
// is answered. They go on until the test ends.
func (b *bench) slowly(t *testing.T, calls int, http2 bool) {
	t.Helper()
	client := b.client(t)
	client.Transport.(*http.Transport).ForceAttemptHTTP2 = http2
	ctx, cancel := context.WithCancel(context.Background())
	var begun, answered atomic.Int32
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got100Continue: func() { begun.Add(1) }})
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	for range calls {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+b.address+garboardv1connect.TrustServiceSignProcedure, never{ctx})
			if err != nil {
				t.Error(err)
				return
			}
			r.Header.Set("Content-Type", "application/proto")
			r.Header.Set("Expect", "100-continue") // it is told when somebody reads the body
			resp, err := client.Do(r)
			answered.Add(1)
			if cancel(); err == nil {
				resp.Body.Close()
			}
		})
	}
	eventually.That(t, 20*time.Second, "all calls to have begun, or to be answered", func() error {
		if begun, over := int(begun.Load()), int(answered.Load()); begun+over < calls {
			return fmt.Errorf("%d have begun, %d are answered", begun, over)
		}
		return nil
	})
}

// never is a body that doesn't come.
type never struct{ ctx context.Context }

func (n never) Read([]byte) (int, error) { <-n.ctx.Done(); return 0, n.ctx.Err() }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// More at once than it looks at are turned away, and it goes on.
func TestTooManyAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.server.calls.Add(maxCalls)
	_, err := b.sign(t, token, request(t, pki.Ed25519, leaf()))
	wantRefused(t, err, connect.CodeResourceExhausted, "too many calls at once")
	b.server.calls.Add(-maxCalls)
	if _, err := b.sign(t, token, request(t, pki.Ed25519, leaf())); err != nil {
		t.Error(err)
	}
}

package apid

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const version = "/garboard.v1.NodeService/Version"

func post(c *http.Client, url string, header http.Header, body io.Reader) (int, string, error) {
	req, err := http.NewRequest(http.MethodPost, url, body)
	if err != nil {
		return 0, "", err
	}
	req.Header = http.Header{"Content-Type": {"application/json"}}
	for name, values := range header {
		req.Header[name] = values
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

func TestTooMuch(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), nil)
	for _, http2 := range []bool{false, true} {
		c := b.client(t, admin(t, ca), http2)
		code, text, err := post(c, b.url(version), nil, bytes.NewReader(make([]byte, maxBody)))
		if code != http.StatusOK {
			t.Errorf("%d bytes: %d %s, %v", maxBody, code, text, err)
		}
		code, text, err = post(c, b.url(version), nil, bytes.NewReader(make([]byte, maxBody+1)))
		if err == nil && (code != http.StatusTooManyRequests || !strings.Contains(text, `"resource_exhausted","message":"the request has 131073 bytes, of at most 131072"`)) {
			t.Errorf("a byte more: %d %s", code, text)
		}
		// Without saying how much comes.
		code, text, err = post(c, b.url(version), nil, io.LimitReader(zeros{}, 64<<20))
		if err == nil && code != http.StatusTooManyRequests {
			t.Errorf("64 MiB without a length: %d %s", code, text)
		}
		code, text, err = post(c, b.url(version), http.Header{"User-Agent": {strings.Repeat("x", 64<<10)}}, http.NoBody)
		if err == nil && code != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("64 KiB of header: %d %s", code, text)
		}
	}
}

// used is how much room is in use.
func used(q *quotas, r room) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.used[r]
}

// A configuration may be larger. Several come at a time.
func TestConfigurations(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), nil)
	c, apply := b.client(t, admin(t, ca), true), b.url(garboardv1connect.ConfigServiceApplyProcedure)
	if code, text, err := post(c, apply, nil, bytes.NewReader(make([]byte, maxConfig))); code != http.StatusOK {
		t.Errorf("%d %s, %v", code, text, err)
	}
	b.gate.admins.used[configRoom] += adminRooms[configRoom].all
	if code, text, err := post(c, apply, nil, http.NoBody); code != http.StatusTooManyRequests {
		t.Errorf("one more: %d %s, %v", code, text, err)
	}
	b.gate.admins.used[configRoom]--
	if code, text, err := post(c, apply, nil, http.NoBody); code != http.StatusOK {
		t.Errorf("after the end of one: %d %s, %v", code, text, err)
	}
}

// A snapshot is larger, and may take longer than any other request, as long as it comes.
func TestUpload(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d bytes, %v", n, err)
	}))
	for _, http2 := range []bool{false, true} {
		c := b.client(t, admin(t, ca), http2)
		code, text, err := post(c, b.url("/garboard.v1.EtcdService/Recover"), nil, io.LimitReader(zeros{}, 64<<20))
		if err != nil || code != http.StatusOK || text != "67108864 bytes, <nil>" {
			t.Errorf("64 MiB: %d %s, %v", code, text, err)
		}
		m, _ := api.Lookup("/garboard.v1.EtcdService/Recover")
		req, err := http.NewRequest(http.MethodPost, b.url(m.Procedure), zeros{})
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = m.Upload + 1
		if resp, err := c.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusTooManyRequests {
				t.Errorf("more than a snapshot has: %s", resp.Status)
			}
		}
	}
}

// How long PID 1 takes over what it has of an upload is no fault of the client, who isn't
// cut off for it; one that sends nothing more is.
func TestUploadInPieces(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	piece := eventually.Scale(3 * time.Second).Round(time.Second)
	ca := newCA(t)
	b := newBench(t, normal(t, ca), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.CopyN(io.Discard, r.Body, size/2); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
		case <-time.After(piece * 3 / 2):
		}
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d bytes, %v", n, err)
	}))
	b.gate.piece = piece
	for _, http2 := range []bool{false, true} {
		c := b.client(t, admin(t, ca), http2)
		code, text, err := post(c, b.url("/garboard.v1.EtcdService/Recover"), nil, io.LimitReader(zeros{}, size))
		if err != nil || code != http.StatusOK || text != fmt.Sprintf("%d bytes, <nil>", size/2) {
			t.Errorf("a slow node, HTTP/2 %v: %d %s, %v", http2, code, text, err)
		}
		stuck, more := io.Pipe()
		go func() { _, _ = more.Write([]byte("{")) }() // until the pipe is closed
		code, text, err = post(c, b.url("/garboard.v1.EtcdService/Recover"), nil, stuck)
		want := "nothing in " + piece.String()
		if !http2 { // net/http takes the client for gone, with its whole connection
			want = "the caller is gone"
		}
		if stuck.Close(); err != nil || code == http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("a client that stops, HTTP/2 %v: %d %s, %v", http2, code, text, err)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Unauthenticated clients that open connections and send nothing don't lock out others.
func TestUnknownClientsDontLockOutOthers(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	for range 2 * maxNew {
		conn, err := net.Dial("tcp", b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	m, _ := api.Lookup(version)
	if err := ask(t.Context(), b.client(t, admin(t, ca), true), b.url(""), m); err != nil {
		t.Error(err)
	}
	if n := b.gate.open.Len(); n > maxNew+1 {
		t.Errorf("%d connections are open", n)
	}
}

// Nor do those whose connections lie idle.
func TestIdleConnectionsMakePlace(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	cert, m := admin(t, ca), methodOf(t, version)
	for range maxConns + 10 {
		config := clientTLS(cert)
		config.NextProtos = []string{"h2"}
		conn, err := tls.Dial("tcp", b.address, config)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	eventually.That(t, 10*time.Second, "a call to go through", func() error {
		return ask(t.Context(), b.client(t, cert, true), b.url(""), m)
	})
}

func methodOf(t testing.TB, procedure string) api.Method {
	t.Helper()
	m, ok := api.Lookup(procedure)
	if !ok {
		t.Fatal(procedure)
	}
	return m
}

// The calls that run at once are bounded, and one more is told so.
func TestTooManyCalls(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	free := make(chan struct{})
	b := newBench(t, normal(t, ca), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != version {
			return
		}
		select {
		case <-free:
		case <-r.Context().Done():
		}
	}))
	var c *http.Client
	done := make(chan struct{}, adminRooms[callRoom].all)
	for i := range adminRooms[callRoom].all {
		if i%(maxStreams/2) == 0 {
			c = b.client(t, admin(t, ca), true)
			// It has its connection then, and knows how many calls that takes.
			if _, _, err := post(c, b.url("/garboard.v1.NodeService/Status"), nil, http.NoBody); err != nil {
				t.Fatal(err)
			}
		}
		go func(c *http.Client) {
			defer func() { done <- struct{}{} }()
			_, _, _ = post(c, b.url(version), nil, http.NoBody)
		}(c)
	}
	eventually.That(t, 20*time.Second, "all calls to be there", func() error {
		if n := used(b.gate.admins, callRoom); n != adminRooms[callRoom].all {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	if code, text, err := post(c, b.url(version), nil, http.NoBody); code != http.StatusTooManyRequests || !strings.Contains(text, "384 calls already") {
		t.Errorf("%d %s, %v", code, text, err)
	}
	close(free)
	for range adminRooms[callRoom].all {
		<-done
	}
	eventually.That(t, 10*time.Second, "the calls to be over", func() error {
		if n := used(b.gate.admins, callRoom); n != 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// A follower that doesn't read holds up neither the node nor other followers, and
// little is kept for it.
func TestFollowerThatDoesntRead(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	var stuck, others atomic.Int64 // bytes that PID 1 could send
	line := []byte(strings.Repeat("x", 1023) + "\n")
	b := newBench(t, normal(t, ca), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		count, most := &others, 1<<20
		if strings.HasSuffix(r.URL.Path, "stuck") {
			count, most = &stuck, 1<<40
		}
		for sent := 0; sent < most; {
			n, err := w.Write(line)
			if err != nil {
				return
			}
			sent += n
			count.Add(int64(n))
		}
	}))
	conn, err := tls.Dial("tcp", b.address, clientTLS(admin(t, ca)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET /v1/logs/stuck HTTP/1.1\r\nHost: n1\r\n\r\n")
	last := int64(-1)
	eventually.That(t, 20*time.Second, "the follower to be stuck", func() error {
		now := stuck.Load()
		defer func() { last = now }()
		if now == 0 || now != last {
			return fmt.Errorf("%d bytes", now)
		}
		return nil
	})
	// Most of it is what the kernel keeps for a TCP connection.
	if n := stuck.Load(); n > 16<<20 {
		t.Errorf("%d MiB are kept for a reader that doesn't read", n>>20)
	}
	c := b.client(t, admin(t, ca), true)
	for range 8 {
		resp, err := c.Get(b.url("/v1/logs/other"))
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if n != 1<<20 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
}

// A client that sends or takes nothing for too long is ended, and with it its call to
// PID 1. What it has read doesn't look whole.
func TestStalledClients(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	line, ended := []byte(strings.Repeat("x", 1023)+"\n"), make(chan string, 4)
	b := prepareBench(t, normal(t, ca), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		for err == nil {
			_, err = w.Write(line)
		}
		ended <- r.URL.Path
	}))
	b.gate.piece, b.gate.stall = eventually.Scale(time.Second), eventually.Scale(time.Second)
	b.listen(t)
	ends := func(path string) {
		t.Helper()
		select {
		case got := <-ended:
			if got != path {
				t.Errorf("%s has ended, not %s", got, path)
			}
		case <-time.After(eventually.Scale(30 * time.Second)):
			t.Fatalf("%s goes on", path)
		}
	}
	for _, http2 := range []bool{false, true} {
		c := b.client(t, admin(t, ca), http2)
		body, more := io.Pipe()
		defer more.Close()
		answer := make(chan int, 1)
		go func() { code, _, _ := post(c, b.url(version), nil, body); answer <- code }()
		ends(version)
		if code := <-answer; code == http.StatusOK {
			t.Errorf("HTTP/2 %v: a request without its body was answered", http2)
		}
		resp, err := c.Get(b.url("/v1/logs/stuck"))
		if err != nil {
			t.Fatal(err)
		}
		ends("/v1/logs/stuck")
		if _, err := io.Copy(io.Discard, resp.Body); err == nil {
			t.Errorf("HTTP/2 %v: an answer that was cut off looks whole", http2)
		}
		resp.Body.Close()
	}
}

// PID 1's end being away is told, and passes.
func TestBackendAway(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	m := methodOf(t, version)
	b.backend.close()
	for _, p := range protocols {
		err := ask(t.Context(), b.client(t, admin(t, ca), p.http2), b.url(""), m, p.options...)
		if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "the node's API isn't there now") {
			t.Errorf("%s: %v", p.name, err)
		}
	}
	newRecorder(t, b.socket, everything())
	if err := ask(t.Context(), b.client(t, admin(t, ca), true), b.url(""), m); err != nil {
		t.Error(err)
	}
}

// An error of PID 1's side arrives as it was meant, with its details.
func TestErrorsPassThrough(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	mux := http.NewServeMux()
	m := methodOf(t, version)
	mux.Handle(m.Procedure, failing(m.Procedure, connect.NewError(connect.CodeAborted, errors.New("somebody was quicker"))))
	b := newBench(t, normal(t, ca), mux)
	for _, p := range protocols {
		err := ask(t.Context(), b.client(t, admin(t, ca), p.http2), b.url(""), m, p.options...)
		if connect.CodeOf(err) != connect.CodeAborted || !strings.Contains(err.Error(), "somebody was quicker") {
			t.Errorf("%s: %v", p.name, err)
		}
	}
}

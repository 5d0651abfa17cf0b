package balance

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// rig is a balancer before API servers, each with a switch.
type rig struct {
	*Balancer
	t     *testing.T
	at    string // where the balancer listens
	trust *tls.Config

	mu      sync.Mutex // guards all below
	servers map[string]*httptest.Server
	ill     map[string]bool
	frozen  map[string]chan struct{} // what is said to the server isn't heard until it is closed
}

func newRig(t *testing.T, o Options, upstreams ...Upstream) *rig {
	t.Helper()
	r := &rig{t: t, trust: &tls.Config{RootCAs: x509.NewCertPool()}, servers: map[string]*httptest.Server{}, ill: map[string]bool{}, frozen: map[string]chan struct{}{}}
	for _, u := range upstreams {
		r.serve(u.Name)
	}
	r.trust.ServerName = "example.com" // httptest's
	o.Dial, o.TLS, o.Log = r.dial, func() *tls.Config { return r.trust }, slog.New(slog.DiscardHandler)
	r.Balancer = New(o)
	t.Cleanup(r.Close)
	r.at = freeport.Find(t).String()
	l, err := net.Listen("tcp4", r.at)
	if err != nil {
		t.Fatal(err)
	}
	r.Serve(l)
	r.Set(upstreams)
	return r
}

func (r *rig) serve(name string) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		ill := r.ill[name]
		r.mu.Unlock()
		switch {
		case req.URL.Path == "/wait":
			w.WriteHeader(http.StatusOK)
			fmt.Fprint(w, name+" ")
			_ = http.NewResponseController(w).Flush()
			<-req.Context().Done()
		case ill:
			http.Error(w, "ill", http.StatusServiceUnavailable)
		default:
			fmt.Fprint(w, name)
		}
	}))
	r.t.Cleanup(s.Close)
	r.servers[name] = s
	r.trust.RootCAs.AddCert(s.Certificate())
}

func (r *rig) set(name string, ill bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ill[name] = ill
}

func (r *rig) dial(ctx context.Context, name string) (net.Conn, error) {
	r.mu.Lock()
	s, frozen := r.servers[name], r.frozen[name]
	r.mu.Unlock()
	if s == nil {
		return nil, errors.New("connection refused")
	}
	if frozen != nil {
		select {
		case <-frozen:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return new(net.Dialer).DialContext(ctx, "tcp4", s.Listener.Addr().String())
}

func (r *rig) get(path string) (*http.Response, error) {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: r.trust.Clone(), DisableKeepAlives: true}}
	return client.Get("https://" + r.at + path)
}

// only waits until answers come from these alone, from each as often.
func (r *rig) only(want ...string) {
	r.t.Helper()
	eventually.That(r.t, 30*time.Second, fmt.Sprintf("answers come from %q alone", want), func() error {
		count := map[string]int{}
		for range 6 {
			resp, err := r.get("/")
			if err != nil {
				count[err.Error()]++
				continue
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			count[fmt.Sprint(resp.StatusCode, " ", string(body))]++
		}
		for _, name := range want {
			if count["200 "+name] != 6/len(want) {
				return fmt.Errorf("%v", count)
			}
		}
		return nil
	})
}

// held are connections that go on until somebody ends them, by server: these have some.
func (r *rig) held(count int, servers ...string) map[string]<-chan error {
	r.t.Helper()
	all := map[string]<-chan error{}
	for range count {
		resp, err := r.get("/wait")
		if err != nil {
			r.t.Fatal(err)
		}
		var name string
		if _, err := fmt.Fscan(resp.Body, &name); err != nil {
			r.t.Fatal(err)
		}
		ended := make(chan error, 1)
		all[name] = ended
		go func() {
			defer resp.Body.Close()
			_, err := io.ReadAll(resp.Body)
			ended <- err
		}()
	}
	for _, name := range servers {
		if all[name] == nil {
			r.t.Fatalf("none is with %s: %v", name, all)
		}
	}
	return all
}

// connected waits until there are so many connections of clients.
func (r *rig) connected(count int) {
	r.t.Helper()
	eventually.That(r.t, 20*time.Second, fmt.Sprintf("there are %d connections", count), func() error {
		r.Balancer.mu.Lock()
		defer r.Balancer.mu.Unlock()
		if len(r.clients) != count {
			return fmt.Errorf("there are %d", len(r.clients))
		}
		return nil
	})
}

func (r *rig) goesOn(ended <-chan error) {
	r.t.Helper()
	select {
	case err := <-ended:
		r.t.Errorf("a connection to a ready server ended: %v", err)
	default:
	}
}

// S-222: connections go to the API servers that are ready, in turn; those to one that
// isn't any more end; and what has come back is used again.
func TestS222ReadyServersInTurn(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, Upstream{Name: "one"}, Upstream{Name: "two"}, Upstream{Name: "three"})
	r.set("three", true)
	r.only("one", "two")
	r.set("three", false)
	r.only("one", "two", "three")
	held := r.held(3, "one", "two", "three")
	r.set("two", true)
	if err := <-held["two"]; err == nil {
		t.Error("a connection to a server that isn't ready ended as if all were well")
	}
	r.only("one", "three")
	r.goesOn(held["one"])
	r.goesOn(held["three"])
}

// A node's own API server comes first, and the cluster's endpoint last.
func TestRanks(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, Upstream{"own", 0}, Upstream{"one", 1}, Upstream{"two", 1}, Upstream{"endpoint", 2})
	r.only("own")
	r.set("own", true)
	r.only("one", "two")
	r.set("one", true)
	r.set("two", true)
	r.only("endpoint")
	r.set("own", false)
	r.only("own")
}

// Before anybody was asked, and while nobody is ready, who takes a connection gets it:
// a cluster that only starts is reached. Once somebody is ready, nobody stays with one
// that isn't.
func TestNobodyIsReady(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, Upstream{"one", 0}, Upstream{"two", 1})
	r.set("one", true)
	r.set("two", true)
	eventually.That(t, 20*time.Second, "both are known not to be ready", func() error {
		for _, s := range r.Upstreams() {
			if s.Since.IsZero() || s.Ready || s.Err == nil {
				return fmt.Errorf("%+v", s)
			}
		}
		return nil
	})
	held := r.held(1, "one")
	r.set("two", false)
	if err := <-held["one"]; err == nil {
		t.Error("a connection to a server that isn't ready ended as if all were well")
	}
	r.only("two")
}

// A connection waits for somebody who is ready, if that is wanted, but not for ever.
func TestHold(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Hold: time.Minute})
	r.serve("one")
	r.set("one", true)
	r.Set([]Upstream{{Name: "one"}}) // who is found ill, from the first question on
	answer := make(chan string, 1)
	go func() {
		resp, err := r.get("/")
		if err != nil {
			answer <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		answer <- string(body)
	}()
	r.connected(1)
	r.set("one", false)
	if got := <-answer; got != "one" {
		t.Errorf("it got %q", got)
	}
	r.set("one", true) // now one learns at once that it is ill
	eventually.That(t, 20*time.Second, "it answers that it is ill", func() error {
		resp, err := r.get("/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable || r.Upstreams()[0].Ready {
			return fmt.Errorf("it answers %s, and counts as ready: %v", resp.Status, r.Upstreams()[0].Ready)
		}
		return nil
	})
	short := newRig(t, Options{Hold: 10 * time.Millisecond}, Upstream{Name: "one"})
	short.set("one", true)
	eventually.That(t, 20*time.Second, "it answers that it is ill", func() error {
		resp, err := short.get("/")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusServiceUnavailable {
				err = fmt.Errorf("it answers %s", resp.Status)
			}
		}
		return err
	})
}

// One that takes packets and doesn't answer holds nobody up for long.
func TestFrozen(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, Upstream{Name: "one"}, Upstream{Name: "two"})
	r.only("one", "two")
	frozen := make(chan struct{})
	defer close(frozen)
	r.mu.Lock()
	r.frozen["one"] = frozen
	r.mu.Unlock()
	r.servers["one"].CloseClientConnections() // what the check kept
	r.only("two")
}

// A server that leaves the list gets no new connections, and keeps what it has while it
// is ready.
func TestListChanges(t *testing.T) {
	t.Parallel()
	changes := make(chan struct{}, 1)
	r := newRig(t, Options{Changed: func() {
		select {
		case changes <- struct{}{}:
		default:
		}
	}}, Upstream{Name: "one"}, Upstream{Name: "two"})
	r.only("one", "two")
	held := r.held(2, "one")
	r.Set([]Upstream{{Name: "two"}})
	<-changes
	r.only("two")
	r.goesOn(held["one"])
	if known := r.Upstreams(); len(known) != 1 || known[0].Name != "two" || !known[0].Ready {
		t.Errorf("known are %+v", known)
	}
	r.set("one", true)
	if err := <-held["one"]; err == nil {
		t.Error("a connection to a server that isn't ready ended as if all were well")
	}
	eventually.That(t, 10*time.Second, "the server that left is forgotten", func() error {
		r.Balancer.mu.Lock()
		defer r.Balancer.mu.Unlock()
		if len(r.backends) != 1 {
			return fmt.Errorf("there are %d", len(r.backends))
		}
		return nil
	})
	r.set("one", false)
	r.Set([]Upstream{{Name: "one"}, {Name: "two"}})
	r.only("one", "two")
}

// The list may be set while connections are handed out by it.
func TestListIsSetMeanwhile(t *testing.T) {
	t.Parallel()
	all := []Upstream{{Name: "a"}, {Name: "b"}}
	r := newRig(t, Options{}, all...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		for ctx.Err() == nil {
			r.Set(all)
		}
	})
	r.only("a", "b")
}

// Connections are bounded; Close ends those that there are.
func TestLimitAndClose(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Max: 2}, Upstream{Name: "one"})
	r.only("one")
	r.connected(0)
	held := r.held(2, "one")
	if resp, err := r.get("/"); err == nil {
		resp.Body.Close()
		t.Error("a third connection was taken")
	}
	other, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.Serve(other)
	r.End(other) // that nobody came from
	r.goesOn(held["one"])
	r.Close()
	if err := <-held["one"]; err == nil || strings.Contains(err.Error(), "refused") {
		t.Errorf("it ended with %v", err)
	}
	if _, err := net.Dial("tcp4", r.at); err == nil {
		t.Error("it still listens")
	}
}

package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"crypto/tls"
	"crypto/x509"
	"net/netip"

	"github.com/garboard-os/garboard/boot/eventually"
)

// apiServers is a reacher of nodes that are HTTPS servers here, each with a switch.
type apiServers struct {
	mu      sync.Mutex // guards all below
	servers map[string]*httptest.Server
	ill     map[string]bool
}

func newAPIServers(t *testing.T, names ...string) (*apiServers, []Node, *tls.Config) {
	t.Helper()
	a := &apiServers{servers: map[string]*httptest.Server{}, ill: map[string]bool{}}
	trust := &tls.Config{RootCAs: x509.NewCertPool()}
	var nodes []Node
	for _, name := range names {
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a.mu.Lock()
			ill := a.ill[name]
			a.mu.Unlock()
			switch {
			case r.URL.Path == "/wait":
				w.WriteHeader(http.StatusOK)
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			case ill:
				http.Error(w, "ill", http.StatusServiceUnavailable)
			default:
				fmt.Fprint(w, name)
			}
		}))
		t.Cleanup(s.Close)
		a.servers[name] = s
		trust.RootCAs.AddCert(s.Certificate())
		nodes = append(nodes, Node{Name: name, Address: netip.MustParseAddr("127.0.0.1")})
	}
	return a, nodes, trust
}

func (a *apiServers) set(name string, ill bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ill[name] = ill
}

func (a *apiServers) Reach(ctx context.Context, n Node, _ int) (net.Conn, error) {
	a.mu.Lock()
	s := a.servers[n.Name]
	a.mu.Unlock()
	return new(net.Dialer).DialContext(ctx, "tcp4", s.Listener.Addr().String())
}

// S-222: connections go to the API servers that are ready, in turn; those to one that
// isn't any more end; and what has come back is used again.
func TestS222BalancerChecksHealth(t *testing.T) {
	t.Parallel()
	a, nodes, trust := newAPIServers(t, "one", "two", "three")
	a.set("three", true)
	b := newBalancer(a, nodes, kubernetesPort, slog.New(slog.DiscardHandler))
	defer b.close()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.serve(l)
	b.check(trust)

	get := func(path string) (*http.Response, error) {
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: trust.Clone(), DisableKeepAlives: true}}
		return client.Get("https://" + l.Addr().String() + path)
	}
	answers := func() map[string]int {
		count := map[string]int{}
		for range 6 {
			resp, err := get("/")
			if err != nil {
				count[err.Error()]++
				continue
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			count[fmt.Sprint(resp.StatusCode, " ", string(body))]++
		}
		return count
	}
	only := func(want ...string) {
		t.Helper()
		eventually.That(t, 30*time.Second, fmt.Sprintf("answers come from %q alone", want), func() error {
			got := answers()
			for _, name := range want {
				if got["200 "+name] != 6/len(want) {
					return fmt.Errorf("%v", got)
				}
			}
			return nil
		})
	}
	only("one", "two")
	a.set("three", false)
	only("one", "two", "three")

	var waiting []*http.Response
	for range 3 { // one of them is with each
		resp, err := get("/wait")
		if err != nil {
			t.Fatal(err)
		}
		waiting = append(waiting, resp)
	}
	ended := make(chan error, len(waiting))
	for _, resp := range waiting {
		go func() {
			_, err := io.ReadAll(resp.Body)
			ended <- err
		}()
	}
	a.set("two", true)
	if err := <-ended; err == nil {
		t.Error("a connection to a node that isn't healthy ended as if all were well")
	}
	only("one", "three")
	select {
	case err := <-ended:
		t.Errorf("a connection to a healthy node ended: %v", err)
	default:
	}
	for _, resp := range waiting {
		resp.Body.Close()
	}
	for range 2 {
		if err := <-ended; errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a connection to a healthy node ended: %v", err)
		}
	}
}

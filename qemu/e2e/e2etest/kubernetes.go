//go:build e2e

package e2etest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	apiServerPort = 6443
	answerMax     = 64 << 20 // bytes
)

// A Server is a client of the Kubernetes API, as an administrator.
type Server struct {
	URL    string
	client *http.Client
	limit  time.Duration // the timeout in requests; 0: none
}

// Endpoint returns a client that uses the load balancer.
func (c *Cluster) Endpoint() *Server {
	return c.server(fmt.Sprintf("https://127.0.0.1:%d", c.KubernetesPort), new(net.Dialer).DialContext)
}

// Server returns a client of the API server on one node.
func (c *Cluster) Server(inside *osthread.Thread, n qemu.Node) *Server {
	return c.server("https://"+netip.AddrPortFrom(n.Address, apiServerPort).String(), func(ctx context.Context, _, address string) (net.Conn, error) {
		return inside.Dial(ctx, address)
	})
}

func (c *Cluster) server(url string, dial func(context.Context, string, string) (net.Conn, error)) *Server {
	c.t.Helper()
	return c.serverAs(url, dial, c.as(c.Secrets().KubernetesCA.CA(), pki.Leaf{CN: "e2e", Orgs: []string{"system:masters"}}))
}

// EndpointAs returns a client that uses the load balancer, with the credentials of a
// kubeconfig.
func (c *Cluster) EndpointAs(kubeconfig string) *Server {
	c.t.Helper()
	ca, crt, key := Credentials(c.t, kubeconfig)
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		c.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return c.serverAs(fmt.Sprintf("https://127.0.0.1:%d", c.KubernetesPort), new(net.Dialer).DialContext,
		&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}})
}

// Credentials are the authorities, the certificate and the key in a kubeconfig.
func Credentials(t testing.TB, kubeconfig string) (ca, crt, key []byte) {
	t.Helper()
	var k config.Kubeconfig
	if err := yaml.Unmarshal([]byte(kubeconfig), &k); err != nil || len(k.Clusters) != 1 || len(k.Users) != 1 {
		t.Fatalf("kubeconfig: %v:\n%s", err, kubeconfig)
	}
	for _, part := range []struct {
		to   *[]byte
		text string
	}{{&ca, k.Clusters[0].Cluster.CA}, {&crt, k.Users[0].User.Crt}, {&key, k.Users[0].User.Key}} {
		var err error
		if *part.to, err = base64.StdEncoding.DecodeString(part.text); err != nil {
			t.Fatalf("kubeconfig: %v", err)
		}
	}
	return ca, crt, key
}

func (c *Cluster) serverAs(url string, dial func(context.Context, string, string) (net.Conn, error), trust *tls.Config) *Server {
	// HTTP/1: after a timeout the connection is closed, so that the next request goes to
	// another server and does not wait for the same one.
	transport := &http.Transport{TLSClientConfig: trust, DialContext: dial, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}
	c.t.Cleanup(transport.CloseIdleConnections)
	return &Server{URL: url, client: &http.Client{Transport: transport, Timeout: eventually.Scale(callBudget)}}
}

// Limited returns the same client, but requests ask the server for a timeout of limit, and
// the client waits longer than that. So it gets the server's error.
func (s *Server) Limited(limit, wait time.Duration) *Server {
	client := *s.client
	client.Timeout = wait
	return &Server{URL: s.URL, client: &client, limit: limit}
}

// Anew returns the same client, but each request has a connection of its own, and is short.
func (s *Server) Anew(wait time.Duration) *Server {
	transport := s.client.Transport.(*http.Transport).Clone()
	transport.DisableKeepAlives = true
	return &Server{URL: s.URL, client: &http.Client{Transport: transport, Timeout: wait}}
}

// Get returns the answer to one request, if its status is 200.
func (s *Server) Get(ctx context.Context, path string) ([]byte, error) {
	return s.do(ctx, http.MethodGet, path, "", http.StatusOK)
}

func (s *Server) do(ctx context.Context, method, path, body string, want int) ([]byte, error) {
	url := s.URL + path
	if s.limit > 0 {
		url += "?timeout=" + s.limit.String()
	}
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != want {
		return nil, fmt.Errorf("%s %s%s: %s: %.200s", method, s.URL, path, resp.Status, answer)
	}
	return answer, nil
}

// Objects returns objects, by name, from one server.
func (s *Server) Objects(ctx context.Context, path string) (map[string]Object, error) {
	answer, err := s.Get(ctx, path)
	if err != nil {
		return nil, err
	}
	var list struct{ Items []Object }
	if err := json.Unmarshal(answer, &list); err != nil {
		return nil, fmt.Errorf("%s%s: %w", s.URL, path, err)
	}
	all := map[string]Object{}
	for _, o := range list.Items {
		all[o.Metadata.Namespace+"/"+o.Metadata.Name] = o
	}
	return all, nil
}

// Object is the part of a Kubernetes object that end-to-end tests compare.
type Object struct {
	Metadata struct{ Namespace, Name, UID string }
	Data     map[string]string // of a config map
}

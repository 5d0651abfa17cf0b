package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api/client/faultyserver"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

func TestAddress(t *testing.T) {
	for node, want := range map[string][2]string{
		"10.5.0.2":              {"10.5.0.2", "10.5.0.2:50000"},
		"10.5.0.2:41000":        {"10.5.0.2", "10.5.0.2:41000"},
		"cluster.example.org":   {"cluster.example.org", "cluster.example.org:50000"},
		"cluster.example.org:1": {"cluster.example.org", "cluster.example.org:1"},
		"fd00::2":               {"fd00::2", "[fd00::2]:50000"},
		"[fd00::2]":             {"fd00::2", "[fd00::2]:50000"},
		"[fd00::2]:1":           {"fd00::2", "[fd00::2]:1"},
		"fe80::2%eth0":          {"fe80::2", "[fe80::2%eth0]:50000"},
		"[fe80::2%eth0]:1":      {"fe80::2", "[fe80::2%eth0]:1"},
	} {
		if host, address, err := Address(node); err != nil || host != want[0] || address != want[1] {
			t.Errorf("%s: %q, %q, %v, want %q", node, host, address, err, want)
		}
	}
	for _, node := range []string{"", ":1", "a:b", "a:0", "a:70000", "https://a", "a/b", "a b", "me@a"} {
		if _, _, err := Address(node); err == nil {
			t.Errorf("%q was taken", node)
		}
	}
}

// versionServer answers one call over TLS, as 10.5.0.2.
type versionServer struct {
	garboardv1connect.UnimplementedNodeServiceHandler
}

func (versionServer) Version(context.Context, *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	return connect.NewResponse(&apiv1.VersionResponse{Version: "v1"}), nil
}

// listen serves in the name of 10.5.0.2, and returns how it is reached, and a
// context that leads there by any other name too.
func listen(t *testing.T, clients *x509.CertPool) *Context {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewNodeServiceHandler(versionServer{}))
	return listenWith(t, clients, mux)
}

func listenWith(t *testing.T, clients *x509.CertPool, handler http.Handler) *Context {
	t.Helper()
	ca := newAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler, ErrorLog: log.New(discard{}, "", 0), TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{ca.leaf(t, netip.MustParseAddr("10.5.0.2"))},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: clients, MinVersion: tls.VersionTLS13,
	}}
	if clients == nil {
		server.TLSConfig.ClientCAs = ca.pool()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.ServeTLS(l, "", "")
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	own := ca.leaf(t, netip.Addr{})
	return &Context{
		CA: encode(pemOf("CERTIFICATE", ca.der)), Crt: encode(pemOf("CERTIFICATE", own.Certificate[0])), Key: encode(keyPEM(t, own)),
		Via: map[string]string{"10.5.0.2": l.Addr().String(), "10.5.0.3": l.Addr().String()},
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func encode(text []byte) string { return base64.StdEncoding.EncodeToString(text) }

func ask(t *testing.T, c *Context, node string) (*Client, string, error) {
	t.Helper()
	client, err := Dial(c, node)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(10*time.Second))
	defer cancel()
	m, err := client.Node.Version(ctx, connect.NewRequest(&apiv1.VersionRequest{}))
	if err != nil {
		return client, "", err
	}
	return client, m.Msg.Version, nil
}

// Another way to a node changes nothing about who it must be.
func TestDialVia(t *testing.T) {
	c := listen(t, nil)
	if _, version, err := ask(t, c, "10.5.0.2"); err != nil || version != "v1" {
		t.Errorf("got %q, %v", version, err)
	}
	var name x509.HostnameError
	if _, _, err := ask(t, c, "10.5.0.3"); !errors.As(err, &name) || name.Host != "10.5.0.3" {
		t.Errorf("a node under the name of another one: %v", err)
	}
}

// A node that doesn't know us says so, whenever a request overtakes that.
func TestRefusal(t *testing.T) {
	c := listen(t, newAuthority(t).pool())
	client, _, err := ask(t, c, "10.5.0.2")
	if err == nil {
		t.Fatal("another cluster's certificate was taken")
	}
	eventually.That(t, time.Minute, "the node to say why, in the little time that it is given", func() error {
		if err := client.Refusal(t.Context()); err == nil || !strings.Contains(err.Error(), "tls: unknown certificate authority") {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
	good, _, err := ask(t, listen(t, nil), "10.5.0.2")
	if err != nil {
		t.Fatal(err)
	}
	if err := good.Refusal(t.Context()); err != nil {
		t.Errorf("a node that has nothing against us: %v", err)
	}
}

// A node that goes down has nothing against us either.
func TestNoRefusalFromANodeThatCloses(t *testing.T) {
	address, stop, err := faultyserver.Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	c := listen(t, nil)
	c.Via["10.5.0.2"] = address
	client, _, err := ask(t, c, "10.5.0.2")
	if err == nil || !Closed(err) {
		t.Errorf("asked: %v", err)
	}
	for range 2 {
		if err := client.Refusal(t.Context()); err != nil {
			t.Errorf("refused: %v", err)
		}
	}
}

func TestDialMaintenance(t *testing.T) {
	c := listen(t, nil)
	call := func(fingerprint string) (*Client, error) {
		client, err := DialMaintenance(c, "10.5.0.2", fingerprint)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		_, err = client.Node.Version(t.Context(), connect.NewRequest(&apiv1.VersionRequest{}))
		return client, err
	}
	first, err := call("")
	if err != nil || len(first.Shown()) != 95 {
		t.Fatalf("shown %q, %v", first.Shown(), err)
	}
	if _, err := call(first.Shown()); err != nil {
		t.Error(err)
	}
	if _, err := call(strings.Repeat("00", 32)); !errors.Is(err, ErrFingerprint) {
		t.Errorf("another fingerprint: %v", err)
	}
	if _, err := DialMaintenance(nil, "10.5.0.2", "00"); err == nil {
		t.Error("half a fingerprint was taken")
	}
}

// The first endpoint that answers is used, even when those before it don't.
func TestAnswering(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := &Context{Via: map[string]string{"up": l.Addr().String(), "off": freeport.Find(t).String()}}
	for _, tc := range []struct {
		endpoints []string
		want      string
	}{{[]string{"off"}, "off"}, {[]string{"off", "up"}, "up"}, {[]string{"up", "off"}, "up"}} {
		if got, err := c.Answering(t.Context(), tc.endpoints); err != nil || got != tc.want {
			t.Errorf("%v: %q, %v", tc.endpoints, got, err)
		}
	}
	if _, err := c.Answering(t.Context(), []string{"off", "not/one"}); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("got %v", err)
	}
}

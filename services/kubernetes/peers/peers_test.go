package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

func newCA(t *testing.T) pki.CA {
	t.Helper()
	ca, err := pki.NewMachineCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// newClient is the client of node n1, whose configuration has this authority.
func newClient(t *testing.T, ca pki.CA) (*Client, *resource.Store) {
	t.Helper()
	store := resource.NewStore()
	put(t, store, ca)
	if err := network.Hostnames.Put(store.As("test"), network.HostnameID, "n1"); err != nil {
		t.Fatal(err)
	}
	c := New(store)
	t.Cleanup(c.Close)
	return c, store
}

func put(t *testing.T, store *resource.Store, ca pki.CA) {
	t.Helper()
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.CA = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, cfg); err != nil {
		t.Fatal(err)
	}
}

// member is a control plane that answers, and remembers who asked.
type member struct {
	garboardv1connect.UnimplementedEtcdServiceHandler
	addr netip.Addr

	mu     sync.Mutex // guards the following
	sends  netip.Addr // the node that it sends callers to
	former bool       // it runs the former release
	shown  []*x509.Certificate
	conns  []string
}

func (m *member) Beginning(context.Context, *connect.Request[apiv1.BeginningRequest]) (*connect.Response[apiv1.BeginningResponse], error) {
	return connect.NewResponse(&apiv1.BeginningResponse{Name: "n2", Member: true}), nil
}

// PullImage makes a beginning, and hangs.
func (m *member) PullImage(ctx context.Context, _ *connect.Request[apiv1.PullImageRequest], s *connect.ServerStream[apiv1.PullImageProgress]) error {
	if err := s.Send(&apiv1.PullImageProgress{Done: 7, Total: 9}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func newMember(t *testing.T, authorities ...pki.CA) *member {
	t.Helper()
	return newNamedMember(t, nil, authorities...)
}

// newNamedMember also has these names.
func newNamedMember(t *testing.T, names []string, authorities ...pki.CA) *member {
	t.Helper()
	l, addr := freeport.Listen(t, api.Port)
	m := &member{addr: addr}
	crt, key, err := authorities[0].Issue(pki.Leaf{CN: "n2", Server: true, DNS: names, IPs: []netip.Addr{addr}, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	for _, ca := range authorities {
		clients.AppendCertsFromPEM(ca.Cert)
	}
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewEtcdServiceHandler(m))
	mux.Handle(garboardv1connect.ImageServicePullProcedure, connect.NewServerStreamHandler(garboardv1connect.ImageServicePullProcedure, m.PullImage))
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		m.shown, m.conns = append(m.shown, r.TLS.PeerCertificates[0]), append(m.conns, r.RemoteAddr)
		to, former := m.sends, m.former
		m.mu.Unlock()
		if to.IsValid() {
			http.Redirect(w, r, "https://"+netip.AddrPortFrom(to, api.Port).String()+r.URL.Path, http.StatusTemporaryRedirect)
			return
		}
		if method, _ := api.Lookup(r.URL.Path); former && method.Former != "" {
			_ = connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodePermissionDenied, errors.New("no role may call POST "+r.URL.Path)))
			return
		}
		if former {
			r.URL.Path = api.Current(r.URL.Path)
		}
		mux.ServeHTTP(w, r)
	}))
	server.Listener.Close()
	server.Listener, server.EnableHTTP2 = l, true
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
	server.StartTLS()
	t.Cleanup(server.Close)
	return m
}

// last is what the last caller has shown, and over how many connections all came.
func (m *member) last() (cert *x509.Certificate, conns int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Clone(m.conns)
	slices.Sort(all)
	return m.shown[len(m.shown)-1], len(slices.Compact(all))
}

func ask(t *testing.T, c *Client, m *member) {
	t.Helper()
	res, err := c.Beginning(t.Context(), m.addr)
	if err != nil || res.GetName() != "n2" || !res.GetMember() {
		t.Fatalf("%v, %v", res, err)
	}
}

// A certificate is a peer's and for an hour. Calls share a connection until it is time
// for another certificate, or the authority or the clock has changed.
func TestCertificateIsRenewed(t *testing.T) {
	t.Parallel()
	ca, next := newCA(t), newCA(t)
	m := newMember(t, ca, next)
	c, store := newClient(t, ca)
	now := time.Now()
	c.Now = func() time.Time { return now }
	renewed := func(why string, want bool, act func()) {
		t.Helper()
		before, conns := m.last()
		act()
		ask(t, c, m)
		after, all := m.last()
		if got := after.SerialNumber.Cmp(before.SerialNumber) != 0; got != want || want != (all > conns) {
			t.Errorf("%s: another certificate: %v, %d connections after %d", why, got, all, conns)
		}
	}
	ask(t, c, m)
	cert, _ := m.last()
	if cert.Subject.CommonName != "n1" || !slices.Equal(cert.Subject.Organization, []string{string(api.Peer)}) || cert.NotAfter.After(now.Add(validity)) ||
		!slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
		t.Errorf("%s, until %s, %v", cert.Subject, cert.NotAfter, cert.ExtKeyUsage)
	}
	renewed("at once", false, func() {})
	renewed("before half of it", false, func() { now = now.Add(renewAt - time.Second) })
	renewed("after half of it", true, func() { now = now.Add(2 * time.Second) })
	renewed("the clock was set back", true, func() { now = now.Add(-time.Minute) })
	renewed("another name", true, func() {
		if err := network.Hostnames.Put(store.As("test"), network.HostnameID, "n3"); err != nil {
			t.Fatal(err)
		}
	})
	// The member's own certificate is of the old authority.
	put(t, store, pki.CA{Cert: slices.Concat(next.Cert, ca.Cert), Key: next.Key})
	ask(t, c, m)
	if cert, _ := m.last(); cert.CheckSignatureFrom(parse(t, next)) != nil {
		t.Error("the certificate isn't of the new authority")
	}
}

// Keys go to no worker, whatever address it has given itself in Kubernetes.
func TestKeysAreForControlPlanes(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	worker, control := newMember(t, ca), newNamedMember(t, []string{"cluster.test"}, ca)
	c, store := newClient(t, ca)
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.CA = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	var err error
	if cfg.Cluster.ControlPlane.Endpoint, err = config.ParseURL("https://cluster.test:6443"); err != nil {
		t.Fatal(err)
	}
	if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, cfg); err != nil {
		t.Fatal(err)
	}
	const keys, none = `{"cluster": {"ca": {"crt": "QQ==", "key": "Qg=="}}}`, `{"cluster": {"ca": {"crt": "QQ=="}}}`
	for _, tt := range []struct {
		m     *member
		patch string
		taken bool
	}{{worker, keys, false}, {worker, none, true}, {control, keys, true}} {
		tt.m.mu.Lock()
		before := len(tt.m.conns)
		tt.m.mu.Unlock()
		_, err := c.Patch(t.Context(), tt.m.addr, "", []byte(tt.patch)) // the members don't know the call
		tt.m.mu.Lock()
		asked := len(tt.m.conns) > before
		tt.m.mu.Unlock()
		if asked != tt.taken || !tt.taken && !strings.Contains(err.Error(), "it isn't a control plane") {
			t.Errorf("%s: asked %v, %v", tt.patch, asked, err)
		}
	}
}

// No node sends a call on to another one, which would take it as this node's.
func TestCallsAreNotRedirected(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	worker, control := newMember(t, ca), newMember(t, ca)
	c, _ := newClient(t, ca)
	worker.sends = control.addr
	_, err := c.Beginning(t.Context(), worker.addr)
	control.mu.Lock()
	asked := len(control.conns)
	control.mu.Unlock()
	if err == nil || asked != 0 {
		t.Errorf("the other node was asked %d times: %v", asked, err)
	}
}

func parse(t *testing.T, ca pki.CA) *x509.Certificate {
	t.Helper()
	cert, err := pki.ParseCert(ca.Cert)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// A node that takes connections and never answers costs the time of a call, and no more.
func TestNodeHangs(t *testing.T) {
	t.Parallel()
	l, addr := freeport.Listen(t, api.Port)
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() { <-t.Context().Done(); conn.Close() })
		}
	})
	t.Cleanup(conns.Wait)
	t.Cleanup(func() { l.Close() })
	c, _ := newClient(t, newCA(t))
	c.timeout = 200 * time.Millisecond
	began := time.Now()
	_, err := c.Beginning(t.Context(), addr)
	if took := time.Since(began); connect.CodeOf(err) != connect.CodeDeadlineExceeded || took > eventually.Scale(10*time.Second) {
		t.Errorf("after %s: %v", took, err)
	}
	if err != nil && (!strings.Contains(err.Error(), "EtcdService/Beginning of node "+addr.String()) || !strings.Contains(err.Error(), "gbctl -n")) {
		t.Errorf("the error names neither node nor next step: %v", err)
	}
}

// A stream ends when its node says nothing any more. A node of the former release knows it by another name.
func TestStreamHangs(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	for _, former := range []bool{false, true} {
		m := newMember(t, ca)
		m.former = former
		c, _ := newClient(t, ca)
		c.timeout = time.Second
		var reported []uint64
		_, err := c.Pull(t.Context(), m.addr, "registry.example/x:1", true, func(done, _ uint64) { reported = append(reported, done) })
		if connect.CodeOf(err) != connect.CodeDeadlineExceeded || !slices.Equal(reported, []uint64{7}) || !strings.Contains(err.Error(), "said nothing for 1s") {
			t.Errorf("former release %v: reported %d: %v", former, reported, err)
		}
	}
}

// Nobody is called but a node of this cluster, and a worker calls nobody.
func TestOnlyWithinTheCluster(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	c, store := newClient(t, ca)
	if _, err := c.Beginning(t.Context(), newMember(t, newCA(t), ca).addr); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a node of another cluster: %v", err)
	}
	m := newMember(t, ca)
	ask(t, c, m)
	put(t, store, pki.CA{Cert: ca.Cert})
	other, _ := newClient(t, pki.CA{Cert: ca.Cert})
	if _, err := other.Beginning(t.Context(), m.addr); !errors.Is(err, errNoKey) || !errors.Is(other.Check(), errNoKey) {
		t.Errorf("a worker: %v", err)
	}
}

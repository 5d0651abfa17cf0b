package balancer

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

const (
	ownAddress   = "10.5.0.2:6443"
	otherAddress = "10.5.0.3:6443"
	loopback     = "127.0.0.1:6443"
	endpointName = "cluster.example.org:6443"
)

const joinToken = "aaaaaa.0123456789abcdef"

// rig is a node, and API servers at addresses of a real cluster; only the way there is
// short.
type rig struct {
	t     *testing.T
	store *resource.Store
	o     Options
	ca    pki.CA
	at    string // where it listens

	mu      sync.Mutex // guards all below
	servers map[string]*httptest.Server
	slice   []string // addresses that Kubernetes tells
	version int      // of slice
	changed chan struct{}
	dialled []string
}

func newRig(t *testing.T, typ config.MachineType, servers ...string) *rig {
	t.Helper()
	ca, err := pki.NewKubernetesCA(time.Now())
	must(t, err)
	r := &rig{t: t, store: resource.NewStore(), ca: ca, servers: map[string]*httptest.Server{}, changed: make(chan struct{})}
	endpoint, err := config.ParseURL("https://" + endpointName)
	must(t, err)
	c := &config.Config{Machine: config.Machine{Type: typ}}
	c.Cluster.CA.Crt = ca.Cert
	c.Cluster.Token = joinToken
	c.Cluster.ControlPlane = config.ControlPlaneSet{Endpoint: endpoint, LocalAPIServerPort: 6443}
	w := r.store.As("test")
	must(t, configuration.Configs.Put(w, configuration.ConfigID, c))
	must(t, network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2")}))
	crt, key, err := ca.Issue(pki.Leaf{CN: "system:node:n1", Orgs: []string{"system:nodes"}, Client: true, Now: time.Now()})
	must(t, err)
	dir := t.TempDir()
	r.o = Options{Store: r.store, address: freeport.Find(t).String(), file: filepath.Join(dir, listFile), kubeletClient: filepath.Join(dir, "kubelet.pem"), proc: dir, dial: r.dial}
	r.at = r.o.address
	must(t, os.WriteFile(r.o.kubeletClient, append(crt, key...), 0o600))
	for _, name := range servers {
		r.serve(name)
	}
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve is an API server, with a certificate that has no address in it.
func (r *rig) serve(name string) {
	crt, key, err := r.ca.Issue(pki.Leaf{CN: "kube-apiserver", DNS: []string{ServerName}, Server: true, Now: time.Now()})
	must(r.t, err)
	pair, err := tls.X509KeyPair(crt, key)
	must(r.t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(r.answer))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequestClientCert}
	s.StartTLS()
	r.t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.servers[name] = s
}

// empty is a load balancer with nobody behind it: it takes connections, and ends them.
func (r *rig) empty(name string) {
	s := httptest.NewUnstartedServer(nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := s.Listener.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	r.t.Cleanup(func() { s.Listener.Close(); <-done })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.servers[name] = s
}

func (r *rig) stop(name string) {
	r.mu.Lock()
	s := r.servers[name]
	delete(r.servers, name)
	r.mu.Unlock()
	s.CloseClientConnections()
}

func (r *rig) dial(ctx context.Context, address string) (net.Conn, error) {
	r.mu.Lock()
	s := r.servers[address]
	r.dialled = append(r.dialled, address)
	r.mu.Unlock()
	if s == nil {
		return nil, errors.New("connection refused")
	}
	return new(net.Dialer).DialContext(ctx, "tcp4", s.Listener.Addr().String())
}

// setEndpoints makes Kubernetes name these addresses.
func (r *rig) setEndpoints(addresses ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slice = addresses
	r.version++
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *rig) answer(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	addresses, changed, version := r.slice, r.changed, strconv.Itoa(r.version)
	r.mu.Unlock()
	slice := map[string]any{"metadata": map[string]any{"name": "kubernetes", "resourceVersion": version},
		"endpoints": []any{map[string]any{"addresses": addresses}}, "ports": []any{map[string]any{"name": "https", "port": 6443}}}
	const path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
	switch {
	case req.URL.Path == "/readyz":
		fmt.Fprint(w, "ok")
	case len(req.TLS.PeerCertificates) == 0 && req.Header.Get("Authorization") != "Bearer "+joinToken:
		http.Error(w, "who are you", http.StatusUnauthorized)
	case req.URL.Path == "/api":
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "APIGroupDiscoveryList"})
	case req.URL.Path == "/apis":
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "APIGroupDiscoveryList", "items": []any{map[string]any{
			"metadata": map[string]any{"name": "discovery.k8s.io"}, "versions": []any{map[string]any{"version": "v1", "resources": []any{
				map[string]any{"resource": "endpointslices", "scope": "Namespaced", "responseKind": map[string]any{"kind": "EndpointSlice"}}}}}}}})
	case req.URL.Path == path && req.URL.Query().Get("fieldSelector") == "metadata.name=kubernetes" && req.URL.Query().Get("watch") == "":
		_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"resourceVersion": version}, "items": []any{slice}})
	case req.URL.Path == path:
		_ = http.NewResponseController(w).Flush()
		if req.URL.Query().Get("resourceVersion") != version { // it changed before this watch began
			_ = json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": slice})
			return
		}
		select {
		case <-changed:
			r.mu.Lock()
			slice["endpoints"] = []any{map[string]any{"addresses": r.slice}}
			r.mu.Unlock()
			_ = json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": slice})
		case <-req.Context().Done():
		}
	default:
		http.NotFound(w, req)
	}
}

// run runs the service until the test, or stop, ends it.
func (r *rig) run() (stop func()) {
	r.t.Helper()
	graph, err := dag.New(dag.Options{Log: func(string) *slog.Logger { return slog.New(slog.NewTextHandler(testWriter{r.t}, nil)) }, SinceBoot: func() time.Duration { return 0 }},
		Service(r.o))
	must(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = graph.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	r.t.Cleanup(stop)
	return stop
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// waitForServers waits until the node's API servers are these: by name, where they are from and
// whether they are ready.
func (r *rig) waitForServers(want map[string]string) {
	r.t.Helper()
	eventually.That(r.t, 20*time.Second, "the node has its API servers", func() error {
		got := map[string]string{}
		for _, o := range APIServers.List(r.store) {
			got[o.ID] = fmt.Sprint(o.Spec.From, " ", o.Spec.Ready)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// answers is who passes a client on, or why nobody does.
func (r *rig) answers() error {
	roots := (&Options{Store: r.store}).trust()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: roots, DisableKeepAlives: true}, Timeout: eventually.Scale(30 * time.Second)}
	resp, err := client.Get("https://" + r.at + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// A worker uses the endpoint, gets the API servers from Kubernetes, follows changes of
// their list, and still has them at the next boot, when the endpoint is gone.
func TestListIsLearntAndKept(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.Worker, endpointName)
	r.setEndpoints()
	stop := r.run()
	r.waitForServers(map[string]string{endpointName: "config true"})
	r.serve(ownAddress)
	r.setEndpoints(strings.TrimSuffix(ownAddress, ":6443"))
	r.waitForServers(map[string]string{endpointName: "config true", ownAddress: "kubernetes true"})
	r.setEndpoints(strings.TrimSuffix(ownAddress, ":6443"), strings.TrimSuffix(otherAddress, ":6443"))
	all := map[string]string{endpointName: "config true", ownAddress: "kubernetes true", otherAddress: "kubernetes false"}
	r.waitForServers(all)
	r.setEndpoints() // nonsense
	r.stop(endpointName)
	all[endpointName] = "config false"
	r.waitForServers(all)
	stop()
	must(t, os.Remove(r.o.kubeletClient))
	r.setEndpoints() // it is told nothing
	if left := APIServers.List(r.store); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	r.run()
	r.waitForServers(all)
	must(t, r.answers())
}

// A machine that is to join learns the control planes with its token: one of them signs its first certificate, and
// nobody but Kubernetes may be at the endpoint. It asks again each second.
func TestListIsLearntBeforeTheNodeJoins(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.Worker, endpointName)
	must(t, os.Remove(r.o.kubeletClient))
	r.setEndpoints(strings.TrimSuffix(otherAddress, ":6443"))
	r.run()
	r.waitForServers(map[string]string{endpointName: "config true", otherAddress: "kubernetes false"})
}

// What is kept is a help; if it is broken, there is the endpoint.
func TestListIsBroken(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.Worker, endpointName)
	must(t, os.WriteFile(r.o.file, []byte("not a list"), 0o600))
	r.setEndpoints(strings.TrimSuffix(otherAddress, ":6443"))
	r.run()
	r.waitForServers(map[string]string{endpointName: "config true", otherAddress: "kubernetes false"})
}

// A control plane's own API server comes first, and is one, not two.
func TestOwnFirst(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.ControlPlane, endpointName, loopback, otherAddress)
	r.setEndpoints(strings.TrimSuffix(ownAddress, ":6443"), strings.TrimSuffix(otherAddress, ":6443"))
	r.run()
	r.waitForServers(map[string]string{loopback: "node true", otherAddress: "kubernetes true", endpointName: "config true"})
	r.mu.Lock()
	r.dialled = nil
	r.mu.Unlock()
	for range 5 {
		must(t, r.answers())
	}
	r.mu.Lock()
	for _, name := range r.dialled {
		if name != loopback {
			t.Errorf("it connected to %s", name)
		}
	}
	r.mu.Unlock()
	r.stop(loopback)
	r.waitForServers(map[string]string{loopback: "node false", otherAddress: "kubernetes true", endpointName: "config true"})
	must(t, r.answers())
}

// While nobody takes connections, clients are refused, as by the API server itself. They are held instead on a node
// that is to join, and while the node's own API server starts for the first time.
func TestGateIsClosed(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.ControlPlane, loopback)
	r.startAPIServer()
	r.run()
	r.waitForServers(map[string]string{loopback: "node true", endpointName: "config false"})
	must(t, r.answers())
	r.empty(endpointName)
	r.stop(loopback)
	refused := func() error {
		err := r.answers()
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("it ends with %w", err)
		}
		return nil
	}
	eventually.That(t, 20*time.Second, "clients are refused", refused)
	r.serve(loopback)
	eventually.That(t, 20*time.Second, "clients are let in again", r.answers)
	r.stop(loopback)
	eventually.That(t, 20*time.Second, "clients are refused again", refused)

	starts := newRig(t, config.ControlPlane)
	starts.startAPIServer()
	starts.run()
	starts.waitForServers(map[string]string{loopback: "node false", endpointName: "config false"})
	starts.isHeld(loopback)

	joins := newRig(t, config.Worker)
	must(t, os.Remove(joins.o.kubeletClient))
	joins.run()
	joins.waitForServers(map[string]string{endpointName: "config false"})
	joins.isHeld(endpointName)
}

// isHeld is that a client which comes before the server does gets to it.
func (r *rig) isHeld(server string) {
	r.t.Helper()
	eventually.That(r.t, 20*time.Second, "clients are let in", func() error {
		conn, err := net.Dial("tcp4", r.at)
		if err == nil {
			conn.Close()
		}
		return err
	})
	answer := make(chan error, 1)
	go func() { answer <- r.answers() }()
	r.serve(server)
	if err := <-answer; err != nil {
		r.t.Errorf("a client that came before %s: %v", server, err)
	}
}

// startAPIServer makes the process of the node's own API server.
func (r *rig) startAPIServer() {
	dir := filepath.Join(r.o.proc, "7")
	must(r.t, os.Mkdir(dir, 0o755))
	must(r.t, os.WriteFile(filepath.Join(dir, "comm"), []byte(apiServer+"\n"), 0o644))
}

// The port may be taken.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	r := newRig(t, config.Worker)
	l, err := net.Listen("tcp4", r.o.address)
	must(t, err)
	defer l.Close()
	if err := Service(r.o).Run(t.Context(), &dag.Handle{Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), r.o.address) {
		t.Error(err)
	}
}

package etcd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"crypto/tls"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// rig is the common part of a cluster's members: its authorities, and a fake
// API server that only knows the addresses of the control planes.
type rig struct {
	t         *testing.T
	etcd, ca  pki.CA
	machine   pki.CA
	apiserver *httptest.Server

	mu     sync.Mutex   // guards what follows
	known  []netip.Addr // the control planes that Kubernetes knows
	tokens string       // the key for tokens
	broken int          // the status that it answers instead
	gone   bool         // it doesn't answer at all
	silent bool         // it accepts requests and never answers
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, gone: true}
	var err error
	r.etcd, err = pki.NewEtcdCA(time.Now())
	must(t, err)
	r.ca, err = pki.NewKubernetesCA(time.Now())
	must(t, err)
	r.machine, err = pki.NewMachineCA(time.Now())
	must(t, err)
	crt, key, err := r.ca.Issue(pki.Leaf{CN: "kube-apiserver", Server: true, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Now: time.Now()})
	must(t, err)
	pair, err := tls.X509KeyPair(crt, key)
	must(t, err)
	r.apiserver = httptest.NewUnstartedServer(http.HandlerFunc(r.serve))
	r.apiserver.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	r.apiserver.StartTLS()
	t.Cleanup(r.apiserver.Close)
	return r
}

func (r *rig) serve(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	silent := r.silent
	r.mu.Unlock()
	if silent {
		<-req.Context().Done()
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		panic(http.ErrAbortHandler) // closes the connection
	}
	if r.broken != 0 {
		http.Error(w, "{}", r.broken)
		return
	}
	if req.URL.Path == jwks {
		_ = json.NewEncoder(w).Encode(map[string]any{"keys": []any{map[string]any{"kid": r.tokens}}})
		return
	}
	addresses := []string{}
	for _, a := range r.known {
		addresses = append(addresses, a.String())
	}
	slice := map[string]any{"ports": []any{map[string]any{"name": "https", "port": 6443}}, "endpoints": []any{map[string]any{"addresses": addresses}}}
	_ = json.NewEncoder(w).Encode(map[string]any{"items": []any{slice}})
}

// knows sets the control planes that Kubernetes knows. Until then, nothing
// answers at the endpoint.
func (r *rig) knows(status int, nodes ...netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone, r.broken, r.known = false, status, nodes
}

// checks sets the key for tokens.
func (r *rig) checks(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone, r.tokens = false, key
}

// down makes the API server, or its machine, stop or come back.
func (r *rig) down(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = yes
}

// swallows makes the API server accept requests and answer none.
func (r *rig) swallows() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.silent = true
}

// node is a control plane with only etcd.
type node struct {
	*Etcd
	rig  *rig
	name string
	dir  string
	addr netip.Addr
	cfg  *config.Config
}

func (r *rig) node(name string, machineType config.MachineType, addr netip.Addr) *node {
	r.t.Helper()
	t := r.t
	n := &node{rig: r, name: name, dir: t.TempDir(), addr: addr, cfg: &config.Config{Version: config.Version}}
	endpoint, err := config.ParseURL(r.apiserver.URL)
	must(t, err)
	n.cfg.Machine.Type = machineType
	n.cfg.Machine.CA = config.CertKey{Crt: r.machine.Cert, Key: r.machine.Key}
	n.cfg.Cluster.ControlPlane.Endpoint = endpoint
	store := resource.NewStore()
	as := store.As("test")
	must(t, configuration.Configs.Put(as, configuration.ConfigID, n.cfg))
	must(t, network.Hostnames.Put(as, network.HostnameID, name))
	must(t, network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: addr}))
	keys := secrets.EtcdSpec{CA: r.etcd.Cert}
	keys.Client.Crt, keys.Client.Key, err = r.etcd.Issue(pki.Leaf{CN: "garboard", Client: true, Now: time.Now()})
	must(t, err)
	keys.Server.Crt, keys.Server.Key, err = r.etcd.Issue(pki.Leaf{
		CN: name, Client: true, Server: true, IPs: []netip.Addr{addr, netip.MustParseAddr("127.0.0.1")}, Now: time.Now(),
	})
	must(t, err)
	must(t, secrets.Etcd.Put(as, secrets.EtcdID, keys))
	must(t, secrets.Kubernetes.Put(as, secrets.KubernetesID, secrets.KubernetesSpec{
		CA: config.CertKey{Crt: r.ca.Cert, Key: r.ca.Key}, Trusted: r.ca.Cert, Endpoint: endpoint.String(),
	}))
	n.Etcd = New(Options{Store: store, Peers: peers.New(store), DataDir: n.path("data"), Journal: n.path("etcd.json")})
	return n
}

func (n *node) path(parts ...string) string {
	return filepath.Join(append([]string{n.dir}, parts...)...)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

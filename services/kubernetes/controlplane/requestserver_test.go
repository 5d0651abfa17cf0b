package controlplane

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

// requestServer is an API server with requests of kubelets, and the node w.
type requestServer struct {
	mu       sync.Mutex // guards all below
	requests map[string]kubeclient.Object
	changed  chan struct{} // closed at the next change
}

func (s *requestServer) ask(name string, request kubeclient.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	request["metadata"].(map[string]any)["name"] = name
	s.requests[name] = request
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *requestServer) approved(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[name].Condition("Approved")
}

func (s *requestServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const path = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	group := func(name, version, resource, kind string) map[string]any {
		return map[string]any{"items": []any{map[string]any{"metadata": map[string]any{"name": name}, "versions": []any{map[string]any{
			"version": version, "resources": []any{map[string]any{"resource": resource, "scope": "Cluster", "responseKind": map[string]any{"kind": kind}}},
		}}}}}
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, path+"/"), "/")
	switch {
	case r.URL.Path == "/readyz":
	case r.URL.Path == "/api":
		answer(group("", "v1", "nodes", "Node"))
	case r.URL.Path == "/apis":
		answer(group("certificates.k8s.io", "v1", "certificatesigningrequests", "CertificateSigningRequest"))
	case r.URL.Path == "/api/v1/nodes":
		answer(map[string]any{"items": []any{map[string]any{"metadata": map[string]any{"name": "w"}, "status": map[string]any{
			"addresses": []any{map[string]any{"type": "InternalIP", "address": "10.5.0.3"}},
		}}}})
	case r.URL.Path == path && r.URL.Query().Get("watch") == "true":
		s.watch(w, r)
	case r.URL.Path == path:
		s.mu.Lock()
		defer s.mu.Unlock()
		answer(map[string]any{"metadata": map[string]any{"resourceVersion": fmt.Sprint(len(s.requests))}, "items": slices.Collect(maps.Values(s.requests))})
	case r.Method == http.MethodPut:
		var o kubeclient.Object
		_ = json.NewDecoder(r.Body).Decode(&o)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.requests[name] = o
		answer(o)
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		answer(s.requests[name])
	}
}

// watch sends the requests that the client hasn't seen yet.
func (s *requestServer) watch(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).Flush()
	for {
		s.mu.Lock()
		changed, count := s.changed, len(s.requests)
		last := s.requests[fmt.Sprintf("csr-%d", count)]
		s.mu.Unlock()
		if fmt.Sprint(count) > r.URL.Query().Get("resourceVersion") {
			_ = json.NewEncoder(w).Encode(map[string]any{"type": "ADDED", "object": last})
			_ = http.NewResponseController(w).Flush()
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
}

// served is the store of a node whose API server is s.
func served(t *testing.T, s http.Handler) *resource.Store {
	t.Helper()
	c := testConfig(t)
	crt, serverKey, err := c.Cluster.CA.CA().Issue(pki.Leaf{CN: "kube-apiserver", DNS: []string{balancer.ServerName}, Server: true, Now: time.Now()})
	put(t, err)
	pair, err := tls.X509KeyPair(crt, serverKey)
	put(t, err)
	server := httptest.NewUnstartedServer(s)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	server.StartTLS()
	t.Cleanup(server.Close)
	admin, key, err := c.Cluster.CA.CA().Issue(pki.Leaf{CN: "admin", Client: true, Now: time.Now()})
	put(t, err)
	store := testStore(t, c)
	put(t, secrets.Kubernetes.Put(store.As("test"), secrets.KubernetesID, secrets.KubernetesSpec{
		CA: c.Cluster.CA, Trusted: c.Cluster.CA.Crt,
		APIServer: config.CertKey{Crt: admin}, Admin: config.CertKey{Crt: admin, Key: key}, Balancer: server.URL,
	}))
	return store
}

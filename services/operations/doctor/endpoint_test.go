package doctor

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// withEndpoint makes the endpoint be something else.
func withEndpoint(url string) ill {
	return func(n *node, _ map[string]*dag.Service) {
		u, err := config.ParseURL(url)
		n.must(err)
		n.config.Cluster.ControlPlane.Endpoint = u
	}
}

// S-353, guide: x509: certificate signed by unknown authority.
func TestS353EndpointOfAnotherCluster(t *testing.T) {
	t.Parallel()
	other, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	url := serveTLS(t, nil, &server{code: 200, body: "ok"}, issue(t, other, pki.Leaf{CN: "kube-apiserver", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}))
	n := start(t, config.Worker, withEndpoint(url))
	n.finds("endpoint-other-cluster", failure, "x509: certificate signed by unknown authority", "issued by", "SHA-256", "cluster.controlPlane.endpoint")
	n.lacks("endpoint-not-answering", "node-not-registered")
}

func TestEndpointWrongName(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		url := serveTLS(t, nil, n.api, issueFor(t, n, "10.9.9.9"))
		withEndpoint(url)(n, services)
	})
	n.finds("endpoint-wrong-name", failure, "valid for 10.9.9.9", "certSANs")
}

// issueFor makes a certificate of the node's cluster: a control plane has the key.
func issueFor(t *testing.T, n *node, addr string) tls.Certificate {
	t.Helper()
	return issue(t, n.authority, pki.Leaf{CN: "kube-apiserver", IPs: []netip.Addr{netip.MustParseAddr(addr)}})
}

func TestEndpointNotKubernetes(t *testing.T) {
	t.Parallel()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	n := start(t, config.Worker, withEndpoint("https"+strings.TrimPrefix(plain.URL, "http")))
	n.finds("endpoint-not-kubernetes", failure, "server gave HTTP response to HTTPS client")

	n = start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		url := serveTLS(t, nil, http.NotFoundHandler(), issueFor(t, n, "127.0.0.1"))
		withEndpoint(url)(n, services)
	})
	n.finds("endpoint-not-kubernetes", failure, "404")
}

// Guide: what is control plane endpoint?
func TestEndpointNotAnswering(t *testing.T) {
	t.Parallel()
	// Its port is only kept at 127.0.0.1, and nobody else listens at 127.0.0.2.
	url := fmt.Sprintf("https://127.0.0.2:%d", freeport.Find(t).Port())
	n := start(t, config.Worker, withEndpoint(url))
	n.finds("endpoint-not-answering", failure, "connection refused", "This node is 10.5.0.2")
	n.lacks("endpoint-not-kubernetes", "endpoint-other-cluster")

	// A control plane that itself serves is pointed away from.
	n = start(t, config.Init, func(n *node, services map[string]*dag.Service) { withEndpoint(url)(n, services) })
	n.finds("endpoint-not-answering", failure, "points to another machine", "127.0.0.2")

	// One that takes the connection and says nothing.
	silent, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	n = start(t, config.Worker, withEndpoint("https://"+silent.Addr().String()))
	n.finds("endpoint-not-answering", failure, "127.0.0.2")
}

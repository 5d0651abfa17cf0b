package etcd

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

var foreignAddress = netip.MustParseAddr("192.0.2.1")

// waits fails unless err is a *wait whose text has the parts.
func waits(t *testing.T, err error, parts ...string) {
	t.Helper()
	var w *wait
	if !errors.As(err, &w) {
		t.Fatalf("error %v isn't a wait", err)
	}
	for _, part := range parts {
		if !strings.Contains(w.what, part) {
			t.Errorf("waits for %q, which doesn't say %q", w.what, part)
		}
	}
}

func TestForeignAuthorityOfKubernetes(t *testing.T) {
	t.Parallel()
	own, other := newRig(t), newRig(t)
	n := own.node("a", config.ControlPlane, foreignAddress)
	endpoint, err := config.ParseURL(other.apiserver.URL)
	must(t, err)
	n.cfg.Cluster.ControlPlane.Endpoint = endpoint
	must(t, secrets.Kubernetes.Put(n.o.Store.As("test"), secrets.KubernetesID, secrets.KubernetesSpec{
		CA: config.CertKey{Crt: own.ca.Cert, Key: own.ca.Key}, Trusted: own.ca.Cert, Endpoint: endpoint.String(),
	}))
	waits(t, n.decide(t.Context()), "cluster.ca", other.apiserver.URL, "another cluster")
	var refusal Refusal
	if _, err := n.Bootstrap(t.Context(), nil); !errors.As(err, &refusal) || !strings.Contains(err.Error(), "another cluster") {
		t.Errorf("bootstrap at the endpoint of another cluster: %v", err)
	}
	if r, err := n.read(); err != nil || r.Phase != none {
		t.Errorf("the journal says %q, %v", r.Phase, err)
	}
}

func TestForeignClientOfKubernetes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.knows(http.StatusUnauthorized)
	waits(t, r.node("a", config.ControlPlane, foreignAddress).decide(t.Context()), "cluster.ca", r.apiserver.URL, "another cluster")
}

// S-214: a node of type init that begins no second cluster reports why it can't
// join the first one.
func TestForeignClusterOfInit(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.knows(http.StatusUnauthorized)
	n := r.node("a", config.Init, foreignAddress)
	waits(t, n.decide(t.Context()), "cluster.ca", "another cluster", "begins no second cluster", "answers at "+r.apiserver.URL+", with 401")
	if r, err := n.read(); err != nil || r.Phase != none {
		t.Errorf("the journal says %q, %v", r.Phase, err)
	}
}

// Another API server has the address of an etcd with a certificate of another
// authority.
func TestForeignAuthorityOfEtcd(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	n := r.node("a", config.ControlPlane, foreignAddress)
	waits(t, n.foreignEtcd(t.Context(), []string{r.apiserver.URL}), "cluster.etcd.ca", r.apiserver.URL, "another cluster")
	// Nothing is known about this one, except that it doesn't answer.
	if err := n.foreignEtcd(t.Context(), []string{"https://127.0.0.1:1"}); err != nil {
		t.Errorf("an etcd that is gone: %v", err)
	}
}

func TestForeignTokens(t *testing.T) {
	t.Parallel()
	for _, alg := range []pki.Algorithm{pki.ECDSA, pki.RSA} {
		r := newRig(t)
		n := r.node("a", config.ControlPlane, foreignAddress)
		key, err := pki.NewKey(alg)
		must(t, err)
		n.cfg.Cluster.ServiceAccount.Key = key
		r.checks("another")
		waits(t, n.sameTokens(t.Context()), "cluster.serviceAccount.key", r.apiserver.URL, "another cluster")
		r.checks(kid(t, key))
		if err := n.sameTokens(t.Context()); err != nil {
			t.Errorf("its own key: %v", err)
		}
		r.checks("another")
		r.down(true)
		if err := n.sameTokens(t.Context()); err != nil {
			t.Errorf("an API server that is gone: %v", err)
		}
	}
}

// kid is Kubernetes' name of a key.
func kid(t *testing.T, text []byte) string {
	t.Helper()
	key, err := pki.ParseKey(text)
	must(t, err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	must(t, err)
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

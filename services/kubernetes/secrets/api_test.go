package secrets

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// S-158, S-157: a control plane makes its API's certificate itself, with all
// the names by which it is reached.
func TestS158API(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	var spec APISpec
	eventually.That(t, 5*time.Second, "the API's certificate", func() error {
		o, err := API.Get(b.store, APIID)
		spec = o.Spec
		return err
	})
	cert := parse(t, spec.Serving.Crt)
	names := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		names = append(names, ip.String())
	}
	slices.Sort(names)
	want := []string{"127.0.0.1", "192.0.2.10", "192.0.2.99", "198.51.100.8", "::1", "api.example.net", "cluster.example.org", "localhost", "n1"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	if !bytes.Equal(spec.CA, c.Machine.CA.Crt) || cert.PublicKeyAlgorithm != x509.Ed25519 {
		t.Errorf("a key of kind %s", cert.PublicKeyAlgorithm)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(spec.CA)
	for _, name := range want {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: start, DNSName: name}); err != nil {
			t.Errorf("as %s: %v", name, err)
		}
	}
}

func TestWorkerHasNoAPISecretsOfItsOwn(t *testing.T) {
	c := controlPlane(t)
	c.Machine.Type = config.Worker
	c.Machine.CA.Key, c.Cluster.CA.Key = nil, nil
	b := newBench(t, c)
	eventually.That(t, 5*time.Second, "kubelet's CA", func() error { _, err := Kubelet.Get(b.store, KubeletID); return err })
	if o, err := API.Get(b.store, APIID); !errors.Is(err, resource.ErrNotFound) {
		t.Error(fmt.Errorf("%+v, %w", o.Spec, err))
	}
}

package secrets

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/network"
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

// A link of the configuration is missing, so networkd waits and publishes no address of the
// node. A control plane is reached at the addresses that it has, and has no other secrets.
func TestAPIWhileNetworkdWaits(t *testing.T) {
	b := startBench(t, controlPlane(t), func(b *bench) {
		b.put(network.Statuses.Put(b.store.As("test"), network.ID, network.Status{Config: 1}))
	})
	has := func(cn string, want ...string) {
		t.Helper()
		eventually.That(t, 5*time.Second, "a certificate for "+strings.Join(want, ", "), func() error {
			o, err := API.Get(b.store, APIID)
			if err != nil {
				return err
			}
			cert := parse(t, o.Spec.Serving.Crt)
			for _, name := range want {
				err = errors.Join(err, cert.VerifyHostname(name))
			}
			if cert.Subject.CommonName != cn {
				err = errors.Join(err, fmt.Errorf("it is of %q", cert.Subject.CommonName))
			}
			return err
		})
	}
	b.put(network.Statuses.Put(b.store.As("test"), network.ID, network.Status{Config: 1, Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("127.0.0.1/8")}}))
	has("localhost", "192.0.2.10", "127.0.0.1", "api.example.net", "cluster.example.org", "192.0.2.99")
	if _, err := Kubernetes.Get(b.store, KubernetesID); !errors.Is(err, resource.ErrNotFound) {
		t.Errorf("the node has certificates of Kubernetes before its address is chosen (%v)", err)
	}
	b.put(network.Hostnames.Put(b.store.As("test"), network.HostnameID, "n1"))
	b.addresses("192.0.2.10/24", "192.0.2.11/24")
	has("n1", "192.0.2.10", "192.0.2.11", "n1")
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

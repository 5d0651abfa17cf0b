//go:build e2e

package controlplane

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// Real etcd and a real control plane continue while their certificates are
// renewed. Only the clock that issues them is changed: the first ones were made
// 280 days ago, so that they are due now, and valid for the programs' own clocks.
func TestRealRenewal(t *testing.T) {
	const age = 280 * 24 * time.Hour
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	began := time.Now()
	for to, name := range map[*config.CertKey]func(time.Time) (pki.CA, error){
		&n.config.Cluster.CA: pki.NewKubernetesCA, &n.config.Cluster.AggregatorCA: pki.NewAggregatorCA, &n.config.Cluster.Etcd.CA: pki.NewEtcdCA,
	} {
		ca, err := name(began.Add(-age))
		put(t, err)
		*to = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	}
	n.prepare()
	var late atomic.Int64
	late.Store(int64(age))
	n.now = func() time.Time { return time.Now().Add(-time.Duration(late.Load())) }
	n.runControllers()
	n.startEtcd()
	for _, program := range Programs {
		n.startProgram(program)
	}
	client := n.admin()
	n.checkManifests(client)
	before := map[string][]byte{}
	for _, program := range Programs {
		data, err := os.ReadFile(n.path("static-pods", "garboard-"+program+".yaml"))
		put(t, err)
		before[program] = data
	}
	servers := map[string]string{"etcd": strings.TrimPrefix(n.etcdURL, "https://"), "apiserver": n.config.Cluster.ControlPlane.Endpoint.Host}
	for name, address := range servers {
		if until := n.served(address); !until.Before(began.Add(pki.RenewBefore)) {
			t.Fatalf("%s already serves a certificate that is good until %s", name, until)
		}
	}

	late.Store(0)
	put(t, clock.Statuses.Put(n.store.As("test"), "node", clock.Status{Synced: true}))
	for name, address := range servers {
		// the apiserver checks at least each minute
		eventually.That(t, 90*time.Second, "renewed certificate of "+name, func() error {
			if until := n.served(address); until.Before(began.Add(pki.LeafValidity - time.Hour)) {
				return fmt.Errorf("it is good until %s", until)
			}
			return nil
		})
	}
	put(t, client.Ready(context.Background()))
	n.checkBootstrap(n.admin()) // the apiserver still works with the controller manager and etcd
	for program, data := range before {
		if now, err := os.ReadFile(n.path("static-pods", "garboard-"+program+".yaml")); err != nil || !bytes.Equal(now, data) {
			t.Errorf("the static pod %s changed: %v", program, err)
		}
	}
}

// served is the end of the validity of the certificate at address.
func (n *realNode) served(address string) time.Time {
	n.t.Helper()
	o, err := secrets.Etcd.Get(n.store, secrets.EtcdID)
	put(n.t, err)
	pair, err := tls.X509KeyPair(o.Spec.Client.Crt, o.Spec.Client.Key)
	put(n.t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(n.config.Cluster.CA.Crt)
	roots.AppendCertsFromPEM(n.config.Cluster.Etcd.CA.Crt)
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", address, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}})
	put(n.t, err)
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].NotAfter
}

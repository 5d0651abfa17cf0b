package etcd

import (
	"net"
	"net/netip"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// etcd stops after the API server of its node if both restart for other authorities, and
// at once for anything else.
func TestStopAfterTheServer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer server.Close()
	cfg := *n.cfg
	cfg.Cluster.ControlPlane.LocalAPIServerPort = server.Addr().(*net.TCPAddr).Port
	cfg.Cluster.Etcd.CA = config.CertKey{Crt: r.etcd.Cert, Key: r.etcd.Key}
	must(t, configuration.Configs.Put(n.o.Store.As("test"), configuration.ConfigID, &cfg))
	digests, err := cfg.Digests()
	must(t, err)
	began := secrets.StatusSpec{Authorities: map[string]string{config.EtcdAuthority: digests[config.EtcdAuthority]}}

	n.awaitServer(t.Context(), nil)
	n.awaitServer(t.Context(), &began)
	own, err := net.Dial("tcp", server.Addr().String())
	must(t, err)
	defer own.Close()
	first, err := server.Accept()
	must(t, err)
	first.Close()
	if first.RemoteAddr().String() != own.LocalAddr().String() {
		t.Error("etcd waits for the API server without other authorities")
	}

	began.Authorities[config.EtcdAuthority] = "another"
	waited := make(chan struct{})
	go func() { defer close(waited); n.awaitServer(t.Context(), &began) }()
	for range 2 { // it looks, and looks again
		conn, err := server.Accept()
		must(t, err)
		conn.Close()
	}
	select {
	case <-waited:
		t.Error("etcd stops while the API server serves")
	default:
	}
	must(t, server.Close())
	<-waited

	if serverBudget+stopBudget >= n.Service().StopBudget {
		t.Errorf("the graph gives up after %s, within the wait for the API server and the stop", n.Service().StopBudget)
	}
}

package etcd

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

// slow is a control plane that is beginning the cluster, and answers late.
type slow struct {
	garboardv1connect.UnimplementedEtcdServiceHandler
}

func (slow) Beginning(ctx context.Context, _ *connect.Request[apiv1.BeginningRequest]) (*connect.Response[apiv1.BeginningResponse], error) {
	select {
	case <-time.After(statusTimeout + time.Second):
	case <-ctx.Done():
	}
	return connect.NewResponse(&apiv1.BeginningResponse{Run: "another", Name: "b", Beginning: true}), nil
}

// S-213: if two nodes are asked to begin the cluster at the same time, neither
// mistakes a slow answer of the other for a machine that is off.
func TestS213SlowPeerCounts(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	n := r.node("a", config.ControlPlane, netip.MustParseAddr("127.77.0.1"))
	other := netip.MustParseAddr("127.77.0.2")
	crt, key, err := r.machine.Issue(pki.Leaf{CN: "b", Server: true, IPs: []netip.Addr{other}, Now: time.Now()})
	must(t, err)
	pair, err := tls.X509KeyPair(crt, key)
	must(t, err)
	l, err := net.Listen("tcp4", net.JoinHostPort(other.String(), strconv.Itoa(api.Port)))
	must(t, err)
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewEtcdServiceHandler(slow{}))
	server := httptest.NewUnstartedServer(mux)
	must(t, server.Listener.Close())
	server.Listener, server.TLS = l, &tls.Config{Certificates: []tls.Certificate{pair}}
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	err = n.alone(t.Context(), record{}, []string{other.String()}, 10*lookTimeout, seen.begun)
	if err == nil || !strings.Contains(err.Error(), `control plane "b" at 127.77.0.2 begins the cluster`) {
		t.Errorf("it would begin beside the other: %v", err)
	}
}

package qemu

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"

	"github.com/garboard-os/garboard/api/balance"
)

// newBalancer hands each connection to the port of one of several nodes. With trust,
// the API servers there are asked whether they are ready; while none is, the first
// that takes a connection gets it. So a cluster that is just starting is reached as
// soon as anybody is there.
func newBalancer(to reacher, nodes []Node, port int, trust *tls.Config, log *slog.Logger) *balance.Balancer {
	byName := map[string]Node{}
	var upstreams []balance.Upstream
	for _, n := range nodes {
		byName[n.Name] = n
		upstreams = append(upstreams, balance.Upstream{Name: n.Name})
	}
	o := balance.Options{
		Dial: func(ctx context.Context, name string) (net.Conn, error) { return to.Reach(ctx, byName[name], port) },
		Log:  log,
	}
	if trust != nil {
		o.TLS = func() *tls.Config { return trust }
	}
	b := balance.New(o)
	b.Set(upstreams)
	return b
}

package etcd

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// serverBudget is how long etcd waits for the end of the API server. The kubelet, which
	// ends it, may only just restart for the same change.
	serverBudget = 15 * time.Second
	serverPoll   = 250 * time.Millisecond
)

// awaitServer waits until this node's API server takes no more requests, if it restarts for
// the same change as etcd: both read the authorities only at their start. An API server
// that serves without its etcd keeps each request until its client gives up.
func (e *Etcd) awaitServer(ctx context.Context, began *secrets.StatusSpec) {
	cfg, err := configuration.Config(e.o.Store)
	if err != nil || began == nil || began.Current(cfg) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, serverBudget)
	defer cancel()
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(cfg.Cluster.ControlPlane.LocalAPIServerPort))
	for range sleep.Every(ctx, serverPoll) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return
		}
		conn.Close()
	}
}

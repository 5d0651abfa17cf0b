package qemu

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"
)

var errSharedClock = errors.New("nodes that are containers have this machine's clock: only one in QEMU can be wrong")

// SetClock makes the hardware clock of a virtual machine wrong, from its next start on and
// until the cluster stops.
func (c *Cluster) SetClock(ctx context.Context, node string, offset time.Duration) error {
	query := url.Values{"offset": {offset.String()}}
	return ask(ctx, c.dir, http.MethodPost, "/nodes/"+node+"/clock?"+query.Encode(), nil)
}

func (h *hostProcess) setClock(n *node, offset time.Duration) error {
	if h.plan.Provisioner != QEMU {
		return errSharedClock
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ClockOffset = offset
	return nil
}

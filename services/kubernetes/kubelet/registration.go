package kubelet

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// nodeLook is how often it is looked whether Kubernetes has the Node (NodeHealths).
	nodeLook = 10 * time.Second
	// registerFirst is the time from then on until a Node that was deleted is registered again: for a person who sees
	// that it was the wrong one, or who is about to reset this one. A person may do so again. What deletes a Node more
	// than registerOften times in a row, each within registerSteady, is a program, and neither gives in: then each
	// further time is twice as long, until it is registerMax.
	registerFirst  = time.Minute
	registerMax    = 16 * time.Minute
	registerSteady = 2 * time.Minute
	registerOften  = 3
)

// NodeDeleted is the reason of a kubelet whose Node was deleted.
const NodeDeleted reason.Code = "NodeDeleted"

// registration is whether Kubernetes has the Node. A kubelet registers only at its start.
type registration struct {
	again atomic.Pointer[time.Time] // when it starts anew, because the Node was deleted; nil: it wasn't
	often int                       // how many times in a row it was deleted within registerSteady
	since time.Time                 // the Node is there; zero: no run has seen it yet
}

// watch returns an error when the kubelet has to start anew. A Node that no run has registered yet isn't one that was
// deleted.
func (r *registration) watch(ctx context.Context, store resource.Reader) error {
	defer r.again.Store(nil)
	if !r.since.IsZero() {
		r.since = time.Now()
	}
	for sleep.For(ctx, nodeLook) {
		health := Health(store)
		at := r.again.Load()
		switch {
		case health.Serves == Unknown || health.Unregistered && r.since.IsZero(): // it may be there
		case !health.Unregistered:
			if r.since.IsZero() || at != nil {
				r.since = time.Now()
			}
			r.again.Store(nil)
		case at == nil:
			if r.often++; time.Since(r.since) > registerSteady {
				r.often = 1
			}
			pause := min(registerFirst<<min(max(r.often-registerOften, 0), registerOften+1), registerMax)
			r.again.Store(new(time.Now().Add(pause)))
		case !time.Now().Before(*at):
			return reason.With(NodeDeleted, errors.New("the Node was deleted from Kubernetes: the kubelet starts anew, and registers it"))
		}
	}
	return nil
}

// healthy is an error while the Node is to be registered again.
func (r *registration) healthy() error {
	at := r.again.Load()
	if at == nil {
		return nil
	}
	return reason.With(NodeDeleted, fmt.Errorf("the Node was deleted from Kubernetes; the kubelet registers it again in %s. If the machine is to go: gbctl reset", time.Until(*at).Round(time.Second)))
}

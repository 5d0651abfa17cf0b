package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// interruptPatience is how long an interruption waits for another control plane, within
	// the time of one request.
	interruptPatience = 12 * time.Second
	// interruptHold is how long the others wait after it: by then etcd counts the member as
	// down, or it is back.
	interruptHold = 5 * time.Second
	// interruptStays is how long they wait for a node that is lost during it: longer than an election.
	interruptStays = time.Minute
)

// Interrupt calls do, which stops or restarts this node's member of etcd without an
// operation. It refuses that where etcd would lose its quorum, unless it is forced. Control
// planes do it one at a time.
func (o Options) Interrupt(ctx context.Context, what string, force bool, do func() error) (warning string, err error) {
	return o.interrupt(ctx, what, force, func(release func(time.Duration)) error {
		defer release(interruptHold)
		return do()
	})
}

// Reboot is Interrupt where do has the node reboot: its member goes on for as long as the services take to stop. The
// lock is released before do, because do stops etcd and the API: a release through an etcd that stops would take longer
// than the API has for the answer to the client.
func (o Options) Reboot(ctx context.Context, what string, force bool, do func() error) (warning string, err error) {
	return o.interrupt(ctx, what, force, func(release func(time.Duration)) error {
		release(holdShutdown)
		return do()
	})
}

func (o Options) interrupt(ctx context.Context, what string, force bool, do func(release func(hold time.Duration)) error) (warning string, err error) {
	release := func(time.Duration) {}
	if !o.controlPlane() {
		return "", do(release)
	}
	taken, warning, held := o.takeTurn(ctx, what, force)
	if taken != nil {
		release = func(hold time.Duration) {
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedTimeout)
			defer cancel()
			_ = taken.Release(rctx, hold) // its lease ends by itself
		}
	}
	bounded, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	unknown, err := o.mayStop(bounded, what, force, 0)
	if err == nil {
		err = ctx.Err() // the request was cancelled: nothing was counted
	}
	if err = cmp.Or(err, held); err != nil { // a holder that is lost is what the quorum lacks: that says more
		release(0)
		return "", err
	}
	return cmp.Or(warning, unknown), do(release)
}

// takeTurn takes the lock of the cluster. warning is why there is none.
func (o Options) takeTurn(ctx context.Context, what string, force bool) (taken operation.Taken, warning string, err error) {
	if o.Lock == nil || o.Holds != nil && o.Holds() { // an operation of this node goes on with it
		return nil, "", nil
	}
	bounded, cancel := context.WithTimeout(ctx, interruptPatience)
	defer cancel()
	for range sleep.Every(bounded, changeRetry) {
		taken, err = o.Lock.Take(bounded, operation.Holder{Name: what, ID: what, Since: time.Now(), Stays: interruptStays})
		switch _, isHeld := errors.AsType[*operation.HeldError](err); {
		case err == nil:
			return taken, "", nil
		case !isHeld || force:
			return nil, err.Error(), nil
		}
	}
	return nil, "", err
}

package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// PressBudget is how long a node may take, after the power button is pressed or a signal asks
// for its end, before it stops its services: for a look at the cluster, and for its pods to
// move away. Hosts give a machine 60 to 180 s.
const PressBudget = time.Minute

const (
	// buttonLook bounds the question whether others can take the pods, and buttonDrain the
	// time that they have: with the question for etcd's quorum (forcedTimeout) they stay
	// within PressBudget.
	buttonLook  = 8 * time.Second
	buttonDrain = 30 * time.Second
)

// Pressed is what the power button asks for.
func Pressed(p boot.Power, by string) operation.Ask {
	drain := durationpb.New(buttonDrain)
	return map[boot.Power]operation.Ask{
		boot.Reboot:   {Name: Reboot, By: by, Arguments: &apiv1.RebootRequest{Button: true, DrainTimeout: drain}},
		boot.PowerOff: {Name: Shutdown, By: by, Arguments: &apiv1.ShutdownRequest{Button: true, DrainTimeout: drain}},
	}[p]
}

// powerSteps are those of a reboot and of a shutdown.
func (j job) powerSteps() []operation.Step {
	// nobody knows when a node is on again that powers off
	hold := map[boot.Power]time.Duration{boot.Reboot: holdReboot, boot.PowerOff: holdShutdown}[j.power]
	encrypt := operation.Step{ID: "encrypt", What: "mark STATE to be encrypted at the start, with what is on it", Deadline: markTimeout, Omit: !j.encrypt,
		Run: func(context.Context, *operation.Progress) error { return j.MarkEncrypt() }}
	before := slices.Concat([]operation.Step{encrypt}, j.emptying(), j.ending(hold))
	// What the power button asked for is done once the node has ended, however it did: by a second press, or because
	// the time for pods was up. Somebody has turned it on again.
	if j.Resuming && j.button {
		before = ended(before)
	}
	return append(before, j.returning()...)
}

// polled runs do until it works.
func polled(do func(context.Context) error) run {
	return func(ctx context.Context, p *operation.Progress) error { return rollout.Poll(ctx, p, do) }
}

// cordon and drain are how a node is emptied. Pods that nobody would make anew
// elsewhere are kept for a node that comes back.
func (j job) cordon(ctx context.Context, c *kubeclient.Client, name string) error {
	did, err := c.Cordon(ctx, name, j.ID)
	switch {
	case kubeclient.IsNotFound(err):
		return rollout.Lasting{Err: operation.Skip("Kubernetes doesn't know this node")}
	case err == nil && !did:
		return rollout.Lasting{Err: operation.Skip("it was cordoned before, and stays so")}
	}
	return err
}

func (j job) drain(ctx context.Context, p *operation.Progress) error {
	return j.Kubernetes.Node(j.Store, func(c *kubeclient.Client, name string) error {
		return kubeclient.Drain{Client: c, Node: name, Keep: j.name != Reset, Report: p.Report}.Run(ctx)
	})
}

// uncordon takes back what this operation has asked for. A node that has asked in vain to be deleted (a worker with
// taints of its own) stays.
func (j job) uncordon(ctx context.Context, c *kubeclient.Client, name string) error {
	if err := j.stay(ctx, c, name); err != nil {
		return err
	}
	_, err := c.Uncordon(ctx, name, j.ID)
	return kubeclient.IgnoreNotFound(err)
}

func (j job) stay(ctx context.Context, c *kubeclient.Client, name string) error {
	return c.Stay(ctx, name, j.ID)
}

// end ends the node, with the reason for its console and its next boot.
func (j job) end(context.Context, *operation.Progress) error {
	j.Power(j.power, strings.TrimSuffix(fmt.Sprintf("%s (%s)", j.By, j.ID), " ()"))
	return nil
}

// quorum is the last moment to see that etcd can't do without this node: a drain may
// have taken hours.
func (j job) quorum(ctx context.Context, _ *operation.Progress) error {
	warning, err := j.mayStop(ctx, j.name, false, etcd.SettleTimeout)
	if err == nil && warning != "" {
		return operation.Skip("%s", warning)
	}
	return err
}

// mayStop refuses what would cost etcd its quorum, unless it is forced. Where members
// can't be counted, neither this node's own answers nor any other: nobody's quorum
// counts on it then, and a restart may be the remedy.
func (o Options) mayStop(ctx context.Context, name string, force bool, patience time.Duration) (warning string, err error) {
	if !o.controlPlane() {
		return "", nil
	}
	timeout := countTimeout + patience
	if force {
		timeout = forcedTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch err = o.Etcd.MayStop(ctx, patience); {
	case err == nil:
		return "", nil
	case !errors.Is(err, etcd.ErrQuorum):
		return "whether etcd has its quorum without this node isn't known: " + err.Error(), nil
	case force:
		return err.Error(), nil
	}
	return "", fmt.Errorf("%w. Start those that don't answer (`gbctl etcd status`), or let a third join where there are two; `gbctl %s --force` goes all the same", err, name)
}

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

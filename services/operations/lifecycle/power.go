package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"google.golang.org/protobuf/types/known/durationpb"
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
	before := slices.Concat(j.emptying(), j.ending(hold))
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

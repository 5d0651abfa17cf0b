package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
)

const (
	// serviceTimeout bounds stopping one: longer than its own budget.
	serviceTimeout = 30 * time.Second
	// podsTimeout is twice the grace that most pods have.
	podsTimeout = time.Minute
	// leaveTimeout is for counting members, removing this one, stopping it and removing
	// its data.
	leaveTimeout = 3 * time.Minute
	// nodeTimeout is for a control plane to delete the Node of a worker, too.
	nodeTimeout = time.Minute
	// markTimeout is for one small write.
	markTimeout = 30 * time.Second
	// againTimeout bounds each of what is done once more after a restart.
	againTimeout = 30 * time.Second
)

// reset reads what a reset is asked with. A record of an earlier release has the disks among its arguments.
func (j *job) reset() error {
	a, err := operation.Decode[apiv1.ResetRequest](j.Request, map[string]string{"wipe": "systemLabelsToWipe"})
	former, bad := operation.Decode[struct{ Disks []disks.UserDisk }](j.Request, nil)
	if err = cmp.Or(err, bad); err != nil {
		return err
	}
	j.UpgradeSystemRequest, j.disks = &apiv1.UpgradeSystemRequest{Force: a.Force, DrainTimeout: a.DrainTimeout}, former.Disks
	j.labels = slices.DeleteFunc(slices.Clone(boot.WipeLabels), func(l string) bool {
		return len(a.SystemLabelsToWipe) > 0 && !slices.Contains(a.SystemLabelsToWipe, l)
	})
	for _, l := range a.SystemLabelsToWipe {
		if !slices.Contains(boot.WipeLabels, l) {
			return fmt.Errorf("--system-labels-to-wipe %q: there are %s", l, strings.Join(boot.WipeLabels, " and "))
		}
	}
	if j.mode = a.WipeMode; j.mode != "" && !slices.Contains(boot.WipeModes, j.mode) {
		return fmt.Errorf("--wipe-mode %q: there are %s", j.mode, strings.Join(boot.WipeModes, ", "))
	}
	if !a.Reboot {
		j.power = boot.PowerOff
	}
	j.named = a.UserDisksToWipe
	return nil
}

// erased are the disks of the user that are wiped, as they were when somebody asked: their names may change with a
// restart.
var erased = operation.Data[[]disks.UserDisk]{Key: "disks"}

// lookAt finds the disks that are named, and sees whether all can be wiped as it is asked for.
func (j *job) lookAt(p *operation.Plan) (err error) {
	if len(j.named) > 0 {
		if j.disks, err = j.UserDisks(j.named); err != nil {
			return fmt.Errorf("--user-disks-to-wipe: %w", err)
		}
		p.Warnings = append(p.Warnings, lists.Of(j.disks, func(u disks.UserDisk) string { return fmt.Sprintf("all that is on %s is lost", u) })...)
		err = erased.In(p, j.disks)
	}
	if err != nil || j.mode == "" {
		return err
	}
	remarks, err := j.Wiping(j.mode, j.labels, j.disks)
	if err != nil {
		return fmt.Errorf("--wipe-mode %s: %w", j.mode, err)
	}
	p.Warnings = append(p.Warnings, remarks...)
	return nil
}

// resetSteps are those of a reset.
func (j job) resetSteps() []operation.Step {
	return slices.Concat(j.emptying(), j.leaving(), j.ending(0), j.returning())
}

// stopKubelet is the first step of a node that goes for good.
func (j job) stopKubelet(ctx context.Context, _ *operation.Progress) error {
	if j.controlPlane() { // the last moment to see that it was asked in vain
		if err := j.mayLeave(ctx, etcd.SettleTimeout); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
	defer cancel()
	return j.Stop(ctx, kubelet.ID)
}

func (j job) leaveEtcd(ctx context.Context, p *operation.Progress) error {
	name, err := j.Etcd.Leave(ctx)
	if err != nil {
		return graceless(err)
	}
	if name == "" {
		return operation.Skip("this node has no member of etcd")
	}
	p.Report("member %s has left", name)
	return nil
}

// startEtcd undoes leaveEtcd. One that is past its own point of no return stops the service yet.
func (j job) startEtcd(ctx context.Context, _ *operation.Progress) error {
	if err := j.Etcd.Settled(ctx); err != nil {
		return err
	}
	return j.Start(ctx, etcd.ID)
}

func (o Options) controlPlane() bool {
	cfg, err := configuration.Config(o.Store)
	return err == nil && cfg.Machine.Type.ControlPlane()
}

func (o Options) mayLeave(ctx context.Context, patience time.Duration) error {
	if err := o.Etcd.MayLeave(ctx, patience); err != nil {
		return graceless(err)
	}
	return nil
}

// graceless adds the way out, for those who know what they do.
func graceless(err error) error {
	return fmt.Errorf("%w. Nothing is wiped. `gbctl reset --graceful=false` leaves nothing in order and asks nobody", err)
}

// deleteNode removes this node from Kubernetes. A control plane may do that itself; a
// kubelet mustn't, so a worker asks for it, and the control planes see to it (package
// controlplane).
func (j job) deleteNode(ctx context.Context, c *kubeclient.Client, name string) error {
	if j.admin() {
		return c.Delete(ctx, kubeclient.NodeRef(name))
	}
	return c.AskToLeave(ctx, name, j.ID, func(message []byte) ([]byte, error) { return secrets.Prove(j.Store, kubeclient.LeavePurpose, message) })
}

// wiped are the partitions and disks that are wiped, in words.
func (j job) wiped() string {
	parts := lists.Some(boot.Wiped(j.labels), func(v boot.Volume) (string, bool) { return fmt.Sprintf("%s (%s)", v.Label, v.Holds), v.Holds != "" })
	text := strings.Join(append(parts, lists.Of(j.disks, func(u disks.UserDisk) string { return u.Path })...), ", ")
	if j.mode != "" {
		text += ", with --wipe-mode " + j.mode
	}
	return text
}

// wipe marks what boot.Volumes has for the labels, and disks of the user. The node erases it when it ends
// (disks.Erase), or else the next boot does. After a restart, the services that the steps before had stopped run again,
// so those steps are done once more, as far as that goes. For later steps of an upgrade, it is left that it is marked.
func (j job) wipe(ctx context.Context, p *operation.Progress) error {
	if j.Resuming && !j.Force {
		j.again(ctx, p)
	}
	users, err := erased.Get(p)
	if err != nil { // there are none, or those of an earlier release
		users = j.disks
	}
	if j.Resuming {
		users = known(users, p)
	}
	if slices.Contains(j.labels, boot.LabelState) {
		if err := j.dropUntried(ctx); err != nil {
			p.Report("a system that hasn't booted yet stays: %v", err)
		}
	}
	err = j.MarkWipe(j.labels, users, j.mode)
	if err == nil && j.writes() {
		err = marked.Put(p, true)
	}
	return err
}

// dropUntried takes a system out of its slot that hasn't booted yet: without META, its first boot wouldn't be on trial.
func (o Options) dropUntried(ctx context.Context) error {
	if o.Systems == nil || o.Systems.Running() == "" {
		return nil
	}
	all, err := o.Systems.Get()
	if name := all.Target(o.Systems.Running()); err == nil && all.Unproven(name) {
		err = o.Systems.Empty(ctx, name)
	}
	return err
}

// known are the disks that are the same for certain after a restart.
func known(users []disks.UserDisk, p *operation.Progress) (same []disks.UserDisk) {
	for _, u := range users {
		if u.Serial != "" {
			same = append(same, u)
		} else {
			p.Report("%s isn't wiped: after the restart, nothing says that it is still the same disk", u)
		}
	}
	return same
}

// again leaves the cluster once more. Each part has its time, and what fails is told.
func (j job) again(ctx context.Context, p *operation.Progress) {
	parts := []func(context.Context) error{
		func(ctx context.Context) error { return j.Stop(ctx, kubelet.ID) },
		j.onNode(j.deleteNode),
		func(ctx context.Context) error {
			if !j.controlPlane() {
				return nil
			}
			_, err := j.Etcd.Leave(ctx)
			return err
		},
	}
	for _, part := range parts {
		pctx, cancel := context.WithTimeout(ctx, againTimeout)
		if err := part(pctx); err != nil && !errors.Is(err, context.Canceled) {
			p.Report("after a restart: %v", err)
		}
		cancel()
	}
}

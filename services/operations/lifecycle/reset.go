package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/machine"
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

// ResetArguments are what a reset is asked with.
type ResetArguments struct {
	// Force is what --graceful=false says: nobody is asked, and nothing is left in order.
	Force  bool `json:"force,omitempty"`
	Reboot bool `json:"reboot,omitempty"` // instead of powering off
	// Wipe are the labels of partitions; none: all that can be wiped.
	Wipe []string `json:"wipe,omitempty"`
	// Disks are those of the user that are wiped, too.
	Disks        []disks.UserDisk `json:"disks,omitempty"`
	DrainTimeout time.Duration    `json:"drainTimeout,omitempty"` // 0: DrainTimeout
}

// wipes are the labels of args, each once, STATE first.
func wipes(args ResetArguments) ([]string, error) {
	for _, l := range args.Wipe {
		if !slices.Contains(boot.WipeLabels, l) {
			return nil, fmt.Errorf("--system-labels-to-wipe %q: there are %s", l, strings.Join(boot.WipeLabels, " and "))
		}
	}
	if len(args.Wipe) == 0 {
		return boot.WipeLabels, nil
	}
	return slices.DeleteFunc(slices.Clone(boot.WipeLabels), func(l string) bool { return !slices.Contains(args.Wipe, l) }), nil
}

// resetJob is a reset that was asked for, checked.
type resetJob struct {
	Options
	operation.Request
	args    ResetArguments
	labels  []string
	timeout time.Duration // of the drain

	// What a look at the cluster has as its result, as in job.
	podsStay, memberless bool
}

func (o Options) resetJob(r operation.Request) (j resetJob, err error) {
	j.Options, j.Request = o, r
	if j.args, err = operation.Decode[ResetArguments](r); err == nil {
		j.labels, err = wipes(j.args)
	}
	if err == nil {
		j.timeout, err = drainTimeout(j.args.DrainTimeout)
	}
	return j, err
}

// planReset refuses where etcd can't do without this node's member.
func (o Options) planReset(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
	j, err := o.resetJob(r)
	if err != nil {
		return p, err
	}
	if j.args.Force {
		p.Unlocked = "it is forced"
		p.Warnings = append(p.Warnings, "the cluster keeps the Node and the member of etcd of this node, if it has one: remove them with `kubectl delete node` and `gbctl etcd remove-member`")
	} else {
		if j.memberless = !o.controlPlane(); !j.memberless {
			if err := o.mayLeave(ctx, 0); err != nil {
				return p, err
			}
		}
		if why := o.alone(ctx, lookBudget); why != "" {
			p.Warnings, j.podsStay = append(p.Warnings, keptPods(why)), true
		}
	}
	for _, u := range j.args.Disks {
		p.Warnings = append(p.Warnings, fmt.Sprintf("all that is on %s is lost", u))
	}
	p.Steps = j.steps()
	return p, nil
}

func (o Options) resetSteps(r operation.Request) ([]operation.Step, error) {
	j, err := o.resetJob(r)
	return j.steps(), err
}

// steps are the plan, or all that it may have.
func (j resetJob) steps() []operation.Step {
	power, orderly := boot.PowerOff, !j.args.Force
	if j.args.Reboot {
		power = boot.Reboot
	}
	return slices.Concat(
		when(orderly && !j.podsStay, j.cordon(j.ID), j.drain(j.timeout, false)),
		when(orderly, j.leave(j.ID)...),
		when(orderly && !j.memberless, j.leaveEtcd()),
		[]operation.Step{j.wipe(j.Request, j.args, j.labels, false), j.end(power, 0, reasonOf(j.Request))},
		// It joins again, perhaps with its Node of before.
		when(orderly && !slices.Contains(j.labels, boot.LabelState), j.back(j.ID)),
	)
}

// leave are the steps of a node that goes for good, before those of its member of etcd and its disk.
func (o Options) leave(id string) []operation.Step {
	return []operation.Step{
		{
			ID: "kubelet", What: "stop the kubelet", Deadline: leaveTimeout,
			Run: func(ctx context.Context, _ *operation.Progress) error {
				// The last moment to see that it was asked in vain.
				if o.controlPlane() {
					if err := o.mayLeave(ctx, etcd.SettleTimeout); err != nil {
						return err
					}
				}
				return o.stop(ctx, kubelet.ID)
			},
			Undo: func(ctx context.Context, _ *operation.Progress) error { return o.Start(ctx, kubelet.ID) },
		},
		{
			ID: "node", What: "delete the Node from Kubernetes", Deadline: nodeTimeout, Optional: true,
			Run: func(ctx context.Context, p *operation.Progress) error {
				return rollout.Poll(ctx, p, func(ctx context.Context) error { return o.deleteNode(ctx, id) })
			},
			Undo: func(ctx context.Context, p *operation.Progress) error {
				return rollout.Poll(ctx, p, func(ctx context.Context) error {
					return o.node(func(c *kubeclient.Client, name string) error { return c.Stay(ctx, name, id) })
				})
			},
		},
		{
			ID: "pods", What: "stop the pods that are left, the control plane's among them", Deadline: podsTimeout, Optional: true,
			Run: func(ctx context.Context, p *operation.Progress) error { return rollout.Poll(ctx, p, o.StopPods) },
		},
	}
}

func (o Options) leaveEtcd() operation.Step {
	return operation.Step{
		ID: "etcd", What: "leave etcd, and remove its data", Deadline: leaveTimeout,
		Run: func(ctx context.Context, p *operation.Progress) error {
			name, err := o.Etcd.Leave(ctx)
			if err != nil {
				return graceless(err)
			}
			if name == "" {
				return operation.Skip("this node has no member of etcd")
			}
			p.Report("member %s has left", name)
			return nil
		},
		Undo: func(ctx context.Context, _ *operation.Progress) error {
			// One that is past its own point of no return stops the service yet.
			if err := o.Etcd.Settled(ctx); err != nil {
				return err
			}
			return o.Start(ctx, etcd.ID)
		},
	}
}

func (o Options) controlPlane() bool {
	cfg, err := machine.Config(o.Store)
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

func (o Options) stop(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
	defer cancel()
	return o.Stop(ctx, id)
}

// deleteNode removes this node from Kubernetes. A control plane may do that itself; a
// kubelet mustn't, so a worker asks for it, and the control planes see to it (package
// controlplane).
func (o Options) deleteNode(ctx context.Context, id string) error {
	return o.node(func(c *kubeclient.Client, name string) error {
		if o.admin() {
			return c.Delete(ctx, kubeclient.NodeRef(name))
		}
		return c.AskToLeave(ctx, name, id, func(message []byte) ([]byte, error) { return secrets.Prove(o.Store, kubeclient.LeavePurpose, message) })
	})
}

// wipe marks what boot.Volumes has for these labels, and disks of the user. The node erases
// it when it ends (disks.Erase), or else the next boot does. After a restart, the services that the steps before had
// stopped run again, so those steps are done once more, as far as that goes. note leaves for later steps that it is marked.
func (o Options) wipe(r operation.Request, args ResetArguments, labels []string, note bool) operation.Step {
	var parts []string
	for _, v := range boot.Wiped(labels) {
		if v.Holds != "" {
			parts = append(parts, fmt.Sprintf("%s (%s)", v.Label, v.Holds))
		}
	}
	for _, u := range args.Disks {
		parts = append(parts, u.Path)
	}
	return operation.Step{
		ID: "wipe", What: "mark for wiping, when the node ends: " + strings.Join(parts, ", "), Deadline: markTimeout + 3*againTimeout,
		PointOfNoReturn: true, WipesJournal: slices.Contains(labels, boot.LabelState),
		Run: func(ctx context.Context, p *operation.Progress) error {
			if r.Resuming && !args.Force {
				o.again(ctx, p, r.ID)
			}
			users := args.Disks
			if r.Resuming {
				users = known(users, p)
			}
			if slices.Contains(labels, boot.LabelState) {
				if err := o.dropUntried(ctx); err != nil {
					p.Report("a system that hasn't booted yet stays: %v", err)
				}
			}
			err := o.MarkWipe(labels, users)
			if err == nil && note {
				err = marked.Put(p, true)
			}
			return err
		},
	}
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
func (o Options) again(ctx context.Context, p *operation.Progress, id string) {
	parts := []func(context.Context) error{
		func(ctx context.Context) error { return o.Stop(ctx, kubelet.ID) },
		func(ctx context.Context) error { return o.deleteNode(ctx, id) },
		func(ctx context.Context) error {
			if !o.controlPlane() {
				return nil
			}
			_, err := o.Etcd.Leave(ctx)
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

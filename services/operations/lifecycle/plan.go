package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/disks"
)

// job is an operation that was asked for, checked.
type job struct {
	Options
	operation.Request
	// What was asked for: a record has fields by their names, and this message those of all but a reset's.
	*apiv1.UpgradeSystemRequest
	name string
	// button: somebody at the machine, or its host, ends it, and won't wait long. What would be a reason to refuse is a
	// warning, and no other node is waited for.
	button       bool
	encrypt      bool // STATE, at the next boot
	drainTimeout time.Duration
	power        boot.Power // how it ends the node
	labels       []string   // of the partitions that are wiped then, each once, STATE first
	named        []string   // disks of the user that are wiped, too
	disks        []disks.UserDisk
	mode         string // one of boot.WipeModes, or ""
	where        string // the system is written to; "": it isn't known yet

	// What a look at the cluster has as its result. Before it, and after a restart, there are all steps.
	podsStay, worker bool
}

// run is what a step runs.
type run = func(context.Context, *operation.Progress) error

func (o Options) job(name string, r operation.Request) (j job, err error) {
	j = job{Options: o, Request: r, name: name, power: boot.Reboot}
	if name == Reset {
		err = j.reset()
	} else if j.UpgradeSystemRequest, err = operation.Decode[apiv1.UpgradeSystemRequest](r, map[string]string{"older": "allowOlder"}); j.Wipe && j.writes() {
		j.labels = []string{boot.LabelEphemeral}
	}
	if name == Shutdown {
		j.power = boot.PowerOff
	}
	if name == Shutdown || name == Reboot {
		pressed, bad := operation.Decode[apiv1.RebootRequest](r, nil)
		j.button, j.encrypt, err = pressed.Button, pressed.EncryptState, cmp.Or(err, bad)
	}
	if j.drainTimeout = cmp.Or(j.GetDrainTimeout().AsDuration(), DrainTimeout); j.drainTimeout < 0 || j.drainTimeout > MaxDrainTimeout {
		err = cmp.Or(err, fmt.Errorf("the time for draining must be more than 0 and at most %s, and not %s", MaxDrainTimeout, j.drainTimeout))
	}
	return j, err
}

// ends reports whether the operation ends the node.
func (j job) ends() bool { return !j.writes() || !j.Stage }

// definition is that of an operation that ends the node.
func (o Options) definition(name, role string, may func() error, steps func(job) []operation.Step) operation.Definition {
	return operation.Definition{
		Name: name, Exclusive: true, Role: role, WithoutJournal: name == Reboot || name == Shutdown,
		Plan: func(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
			if err = may(); err != nil {
				return p, err
			}
			j, err := o.job(name, r)
			if err == nil && j.switches() {
				err = j.lookHere(ctx, &p)
			}
			switch {
			case err != nil:
				return p, err
			case j.ends():
				err = j.look(ctx, &p)
			default:
				p.Unlocked = "the node isn't restarted"
			}
			p.Steps = steps(j)
			return p, err
		},
		Steps: func(r operation.Request) ([]operation.Step, error) {
			j, err := o.job(name, r)
			if err != nil {
				return nil, err
			}
			return steps(j), nil
		},
	}
}

// look completes a plan by what there is to know of the cluster.
func (j *job) look(ctx context.Context, p *operation.Plan) (err error) {
	warn := func(text string) {
		if text != "" {
			p.Warnings = append(p.Warnings, text)
		}
	}
	j.worker = !j.controlPlane()
	switch {
	case j.name == Reset && j.Force:
		warn("the cluster keeps the Node and the member of etcd of this node, if it has one: remove them with `kubectl delete node` and `gbctl etcd remove-member`")
	case j.name == Reset && !j.worker:
		err = j.mayLeave(ctx, 0)
	case j.name != Reset:
		var warning string
		warning, err = j.mayStop(ctx, j.name, j.Force || j.button, 0)
		warn(warning)
	}
	if err != nil {
		return err
	}
	budget := lookBudget
	switch {
	case j.Force:
		p.Unlocked = "it is forced"
	case j.button:
		p.Unlocked, budget = "it was asked for at the machine, or by its host", buttonLook
	}
	if j.podsStay = j.Force || j.KeepPods; !j.podsStay {
		if why := j.alone(ctx, budget); why != "" {
			j.podsStay = true
			warn("the pods of this node end with it, without a drain: " + why)
		}
	}
	return j.lookAt(p)
}

// empties reports whether the node is emptied, and leaves whether it leaves the cluster. In the end, what is wiped is.
func (j job) empties() bool { return j.ends() && !j.podsStay && !j.Force }
func (j job) leaves() bool  { return j.wipes() && !j.Force }
func (j job) wipes() bool   { return len(j.labels) > 0 && j.ends() }

// emptying are the steps after which the node has no pods that others can have, and nobody needs it.
func (j job) emptying() []operation.Step {
	return []operation.Step{
		{ID: "cordon", What: "keep new pods from this node", Deadline: changeTimeout, Optional: true, Omit: !j.empties(),
			Run: polled(j.onNode(j.cordon)), Undo: polled(j.onNode(j.uncordon))},
		{ID: "drain", What: "evict the pods of this node, within their disruption budgets", Deadline: j.drainTimeout, Optional: true,
			Omit: !j.empties(), Run: j.drain},
		{ID: "quorum", What: "see that etcd keeps its quorum without this node", Deadline: countTimeout + etcd.SettleTimeout + time.Second,
			Omit: !j.empties() || j.wipes() || j.button || j.worker, Run: j.quorum},
	}
}

// leaving are the steps of a node that leaves the cluster, and of which something is wiped.
func (j job) leaving() []operation.Step {
	return []operation.Step{
		{ID: "kubelet", What: "stop the kubelet", Deadline: leaveTimeout, Omit: !j.leaves(), Run: j.stopKubelet,
			Undo: func(ctx context.Context, _ *operation.Progress) error { return j.Start(ctx, kubelet.ID) }},
		{ID: "node", What: "delete the Node from Kubernetes", Deadline: nodeTimeout, Optional: true, Omit: !j.leaves(),
			Run: polled(j.onNode(j.deleteNode)), Undo: polled(j.onNode(j.stay))},
		{ID: "pods", What: "stop the pods that are left, the control plane's among them", Deadline: podsTimeout, Optional: true,
			Omit: !j.leaves(), Run: polled(j.StopPods)},
		{ID: "etcd", What: "leave etcd, and remove its data", Deadline: leaveTimeout, Omit: !j.leaves() || j.worker,
			Run: j.leaveEtcd, Undo: j.startEtcd},
		{ID: "wipe", What: "mark for wiping, when the node ends: " + j.wiped(), Deadline: markTimeout + 3*againTimeout, Omit: !j.wipes(),
			PointOfNoReturn: true, WipesJournal: slices.Contains(j.labels, boot.LabelState), Run: j.wipe},
	}
}

// ending is the step that ends the node. hold is how long the others wait.
func (j job) ending(hold time.Duration) []operation.Step {
	what := map[boot.Power]string{boot.Reboot: "restart the machine", boot.PowerOff: "power the machine off"}[j.power]
	return []operation.Step{{ID: "end", What: "stop all services, and " + what, Deadline: endTimeout, EndsNode: true, Hold: hold,
		PointOfNoReturn: true, Omit: !j.ends(), Run: j.end}}
}

// returning are the steps of a node that is back.
func (j job) returning() []operation.Step {
	return []operation.Step{
		// Pods may come again to either system, so that is before it is known which one stays. A node that was reset
		// joins again, perhaps with its Node of before.
		{ID: "uncordon", What: "let pods come again, once the node is back", Deadline: backTimeout, Optional: true,
			Omit: !j.empties() && !j.leaves() || slices.Contains(j.labels, boot.LabelState), Run: polled(j.onNode(j.uncordon))},
		// An operation that goes on takes the lock of the cluster again, as soon as etcd gives it, and releases it at
		// its end. That is all there is to do.
		{ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
			Omit: !j.ends() || j.Force || j.power == boot.PowerOff || j.name == Reset, Run: polled(func(context.Context) error { return nil })},
	}
}

// ended are the steps up to the end of the node, once it has ended: the operation must not end it again.
func ended(steps []operation.Step) []operation.Step {
	return lists.Of(steps, func(s operation.Step) operation.Step {
		s.EndsNode = false
		s.Run = func(context.Context, *operation.Progress) error {
			return operation.Skip("the node has ended meanwhile")
		}
		return s
	})
}

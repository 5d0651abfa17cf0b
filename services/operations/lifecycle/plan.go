package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/disks"
)

// PowerArguments are what reboot, shutdown, install, upgrade and rollback are asked with.
type PowerArguments struct {
	// Force: at once, without regard to pods or to other nodes.
	Force bool `json:"force,omitempty"`
	// KeepPods: the node isn't emptied.
	KeepPods bool `json:"keepPods,omitempty"`
	// Button: somebody at the machine, or its host, ends it, and won't wait long. What would
	// be a reason to refuse is a warning, and no other node is waited for.
	Button       bool          `json:"button,omitempty"`
	DrainTimeout time.Duration `json:"drainTimeout,omitempty"` // 0: DrainTimeout
	Image        string        `json:"image,omitempty"`        // of install and upgrade; "": the medium in the machine
	Older        bool          `json:"older,omitempty"`        // install and upgrade take a release below the floor
	Stage        bool          `json:"stage,omitempty"`        // upgrade doesn't restart the node
	// upgrade wipes EPHEMERAL, and the node joins the cluster again
	Wipe bool `json:"wipe,omitempty"`
}

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

// job is an operation that was asked for, checked.
type job struct {
	Options
	operation.Request
	PowerArguments
	name   string
	power  boot.Power       // how it ends the node
	labels []string         // of the partitions that are wiped then, each once, STATE first
	disks  []disks.UserDisk // that are wiped, too
	where  string           // the system is written to; "": it isn't known yet

	// What a look at the cluster has as its result. Before it, and after a restart, there are all steps.
	podsStay, worker bool
}

// run is what a step runs.
type run = func(context.Context, *operation.Progress) error

func (o Options) job(name string, r operation.Request) (j job, err error) {
	j = job{Options: o, Request: r, name: name, power: boot.Reboot}
	if name == Reset {
		var a ResetArguments
		a, err = operation.Decode[ResetArguments](r)
		j.PowerArguments, j.disks = PowerArguments{Force: a.Force, DrainTimeout: a.DrainTimeout}, a.Disks
		for _, l := range boot.WipeLabels {
			if len(a.Wipe) == 0 || slices.Contains(a.Wipe, l) {
				j.labels = append(j.labels, l)
			}
		}
		for _, l := range a.Wipe {
			if !slices.Contains(boot.WipeLabels, l) {
				err = cmp.Or(err, fmt.Errorf("--system-labels-to-wipe %q: there are %s", l, strings.Join(boot.WipeLabels, " and ")))
			}
		}
		if !a.Reboot {
			j.power = boot.PowerOff
		}
	} else if j.PowerArguments, err = operation.Decode[PowerArguments](r); j.Wipe && j.writes() {
		j.labels = []string{boot.LabelEphemeral}
	}
	if name == Shutdown {
		j.power = boot.PowerOff
	}
	if j.DrainTimeout = cmp.Or(j.DrainTimeout, DrainTimeout); j.DrainTimeout < 0 || j.DrainTimeout > MaxDrainTimeout {
		err = cmp.Or(err, fmt.Errorf("the time for draining must be more than 0 and at most %s, and not %s", MaxDrainTimeout, j.DrainTimeout))
	}
	return j, err
}

// writes reports whether the operation writes a system, switches whether it brings another one, and ends whether it
// ends the node.
func (j job) writes() bool   { return j.name == Install || j.name == Upgrade }
func (j job) switches() bool { return j.writes() || j.name == Rollback }
func (j job) ends() bool     { return !j.writes() || !j.Stage }

// definition is that of an operation that ends the node.
func (o Options) definition(name, role string, may func() error) operation.Definition {
	return operation.Definition{
		Name: name, Exclusive: true, Role: role, WithoutJournal: name == Reboot || name == Shutdown,
		Plan: func(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
			if err = may(); err != nil {
				return p, err
			}
			j, err := o.job(name, r)
			if err == nil && j.writes() {
				err = j.mayWrite(ctx)
			}
			if err == nil && j.ends() {
				err = j.look(ctx, &p)
			} else if err == nil {
				p.Unlocked = "the node isn't restarted"
			}
			p.Steps = j.steps()
			return p, err
		},
		Steps: func(r operation.Request) ([]operation.Step, error) {
			j, err := o.job(name, r)
			return j.steps(), err
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
		warning, err = j.mayStop(ctx, j.name, j.Force || j.Button, 0)
		warn(warning)
	}
	if err != nil {
		return err
	}
	budget := lookBudget
	switch {
	case j.Force:
		p.Unlocked = "it is forced"
	case j.Button:
		p.Unlocked, budget = "it was asked for at the machine, or by its host", buttonLook
	}
	if j.podsStay = j.Force || j.KeepPods; !j.podsStay {
		if why := j.alone(ctx, budget); why != "" {
			j.podsStay = true
			warn("the pods of this node end with it, without a drain: " + why)
		}
	}
	for _, u := range j.disks {
		warn(fmt.Sprintf("all that is on %s is lost", u))
	}
	return nil
}

// steps are the plan, or all that it may have.
func (j job) steps() []operation.Step {
	wipes := len(j.labels) > 0 && j.ends()
	leaves, empties := wipes && !j.Force, j.ends() && !j.podsStay && !j.Force
	end := map[boot.Power]string{boot.Reboot: "stop all services, and restart the machine", boot.PowerOff: "stop all services, and power the machine off"}[j.power]
	// nobody knows when the node is on again
	hold := map[boot.Power]time.Duration{boot.Reboot: holdReboot, boot.PowerOff: holdShutdown}[j.power]
	if j.name == Reset {
		hold = 0
	}
	steps := []operation.Step{
		{ID: "find", What: "find the system on the medium", Deadline: verifyTimeout, Omit: !j.writes() || j.Image != "",
			Run: j.remembering(j.get)},
		{ID: "pull", What: "pull the image " + j.Image, Deadline: pullTimeout, Omit: !j.writes() || j.Image == "",
			Run: j.remembering(j.withContainerd(j.get))},
		{ID: "verify", What: "read the system, and compare its checksum", Deadline: verifyTimeout, Omit: !j.writes(),
			Run: j.withContainerd(source.Then(j.verify))},
		{ID: "images", What: "pull the images that the system runs pods with", Deadline: pullTimeout,
			// a machine that isn't installed may have no containerd
			Omit: j.name != Upgrade, Run: source.Then(j.images)},
		{ID: "write", What: "write the system to " + cmp.Or(j.where, "the slot that doesn't run"), Deadline: writeTimeout, Omit: !j.writes(),
			Run: j.withContainerd(source.Then(j.write)), Undo: target.Then(j.unwrite)},
		{ID: "cordon", What: "keep new pods from this node", Deadline: changeTimeout, Optional: true, Omit: !empties,
			Run: j.remembering(polled(j.onNode(j.cordon))), Undo: polled(j.onNode(j.uncordon))},
		{ID: "drain", What: "evict the pods of this node, within their disruption budgets", Deadline: j.DrainTimeout, Optional: true,
			Omit: !empties, Run: j.drain},
		{ID: "quorum", What: "see that etcd keeps its quorum without this node", Deadline: countTimeout + etcd.SettleTimeout + time.Second,
			Omit: !empties || wipes || j.Button || j.worker, Run: j.quorum},
		{ID: "kubelet", What: "stop the kubelet", Deadline: leaveTimeout, Omit: !leaves, Run: j.stopKubelet,
			Undo: func(ctx context.Context, _ *operation.Progress) error { return j.Start(ctx, kubelet.ID) }},
		{ID: "node", What: "delete the Node from Kubernetes", Deadline: nodeTimeout, Optional: true, Omit: !leaves,
			Run: polled(j.onNode(j.deleteNode)), Undo: polled(j.onNode(j.stay))},
		{ID: "pods", What: "stop the pods that are left, the control plane's among them", Deadline: podsTimeout, Optional: true,
			Omit: !leaves, Run: polled(j.StopPods)},
		{ID: "etcd", What: "leave etcd, and remove its data", Deadline: leaveTimeout, Omit: !leaves || j.worker,
			Run: j.leaveEtcd, Undo: j.startEtcd},
		{ID: "wipe", What: "mark for wiping, when the node ends: " + j.wiped(), Deadline: markTimeout + 3*againTimeout, Omit: !wipes,
			PointOfNoReturn: true, WipesJournal: slices.Contains(j.labels, boot.LabelState), Run: j.wipe},
		{ID: "choose", What: "make the other slot boot next", Deadline: chooseTimeout, Omit: j.name != Rollback,
			Run: j.remembering(j.choose), Undo: target.Then(j.unchoose)},
		{ID: "end", What: end, Deadline: endTimeout, EndsNode: true, Hold: hold, PointOfNoReturn: true, Omit: !j.ends(), Run: j.end},
		// Pods may come again to either system, so that is before it is known which one stays. A node that was reset
		// joins again, perhaps with its Node of before.
		{ID: "uncordon", What: "let pods come again, once the node is back", Deadline: backTimeout, Optional: true,
			Omit: !empties && !leaves || slices.Contains(j.labels, boot.LabelState), Run: polled(j.onNode(j.uncordon))},
		// An operation that goes on takes the lock of the cluster again, as soon as etcd gives it, and releases it at
		// its end. That is all there is to do.
		{ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
			Omit: !j.ends() || j.Force || j.power == boot.PowerOff || j.name == Reset, Run: polled(func(context.Context) error { return nil })},
		{ID: "prove", What: "see that the system is healthy", Deadline: ProveTimeout(boot.Slot{Wiped: j.Wipe}) + proveGrace,
			Omit: !j.ends() || !j.switches(), Run: j.prove},
	}
	// What the power button asked for is done once the node has ended, however it did: by a
	// second press, or because the time for pods was up. After that the operation must not end
	// the node that somebody has turned on again. And a new system has one boot.
	if j.Resuming && (j.Button || j.switches() && j.Systems != nil && j.Systems.Trial()) {
		ended(steps)
	}
	return steps
}

// ended skips the steps up to the one that ends the node.
func ended(steps []operation.Step) {
	end := slices.IndexFunc(steps, func(s operation.Step) bool { return s.EndsNode && !s.Omit })
	for i := range steps[:end+1] {
		steps[i].EndsNode = false
		steps[i].Run = func(context.Context, *operation.Progress) error {
			return operation.Skip("the node has ended meanwhile")
		}
	}
}

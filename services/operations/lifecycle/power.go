package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
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
	Wipe         bool          `json:"wipe,omitempty"`         // upgrade wipes EPHEMERAL, and the node joins the cluster again
}

// job is a reboot, a shutdown, or a boot with another system, that was asked for.
type job struct {
	Options
	operation.Request
	PowerArguments
	name    string
	timeout time.Duration // of the drain
	where   string        // the system is written to; "": it isn't known yet

	// What a look at the cluster has as its result. Before it, and after a restart, there are all steps.
	podsStay, uncounted bool
}

func (o Options) job(name string, r operation.Request) (j job, err error) {
	j = job{Options: o, Request: r, name: name}
	if j.PowerArguments, err = operation.Decode[PowerArguments](r); err == nil {
		j.timeout, err = drainTimeout(j.DrainTimeout)
	}
	j.Wipe = j.Wipe && j.writes()
	return j, err
}

// restart is the definition of an operation that ends the node. Whoever chooses what runs on a node can do all.
func (o Options) restart(name string, may func() error) operation.Definition {
	only := name == Reboot || name == Shutdown
	return operation.Definition{
		Name: name, Exclusive: true, Role: map[bool]string{true: "os:operator", false: "os:admin"}[only], WithoutJournal: only,
		Plan: func(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
			if err = may(); err != nil {
				return p, err
			}
			j, err := o.job(name, r)
			if err == nil && j.writes() {
				err = j.mayWrite(ctx)
			}
			if err == nil {
				err = j.look(ctx, &p)
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

func anytime() error { return nil }

// look completes a plan by what there is to know of the cluster.
func (j *job) look(ctx context.Context, p *operation.Plan) error {
	if j.stages() {
		p.Unlocked = "the node isn't restarted"
		return nil
	}
	warning, err := j.mayStop(ctx, j.name, j.Force || j.Button, 0)
	if err != nil {
		return err
	}
	if warning != "" {
		p.Warnings = append(p.Warnings, warning)
	}
	switch {
	case j.Force:
		p.Unlocked = "it is forced"
	case j.Button:
		p.Unlocked = "it was asked for at the machine, or by its host"
	}
	j.uncounted, j.podsStay = j.Button || !j.controlPlane(), j.Force || j.KeepPods
	if j.podsStay {
		return nil
	}
	budget := lookBudget
	if j.Button {
		budget = buttonLook
	}
	if why := j.alone(ctx, budget); why != "" {
		p.Warnings, j.podsStay = append(p.Warnings, keptPods(why)), true
	}
	return nil
}

// steps are the plan, or all that it may have.
func (j job) steps() []operation.Step {
	how, hold := boot.Reboot, holdReboot
	if j.name == Shutdown { // nobody knows when the node is on again
		how, hold = boot.PowerOff, holdShutdown
	}
	ends, wipes, empties := !j.stages(), j.Wipe && !j.stages(), !j.podsStay && !j.stages()
	steps := slices.Concat(
		when(j.writes(), j.get(), j.verify()),
		when(j.name == Upgrade, j.images()), // a machine that isn't installed may have no containerd
		when(j.writes(), j.write()),
		when(empties, j.cordon(j.ID), j.drain(j.timeout, true)),
		when(empties && !j.uncounted && !wipes, j.quorum(j.name)),
		when(wipes, j.leave(j.ID)...),
		when(wipes && j.controlPlane(), j.leaveEtcd()),
		when(wipes, j.wipe(j.Request, ResetArguments{}, []string{boot.LabelEphemeral}, true)),
		when(j.name == Rollback, j.choose()),
		when(ends, j.end(how, hold, reasonOf(j.Request))),
		// Pods may come again to either system, so that is before it is known which one stays.
		when(empties, j.back(j.ID)),
		when(ends && how == boot.Reboot && !j.Force, letGo),
		when(ends && (j.writes() || j.name == Rollback), j.prove()),
	)
	if j.writes() || j.name == Rollback {
		steps[0].Run = j.remembering(steps[0].Run)
	}
	// What the power button asked for is done once the node has ended, however it did: by a
	// second press, or because the time for pods was up. After that the operation must not end
	// the node that somebody has turned on again. And a new system has one boot.
	if j.Resuming && (j.Button || j.Systems != nil && j.Systems.Trial() && (j.writes() || j.name == Rollback)) {
		ended(steps)
	}
	return steps
}

// letGo is the end of a reboot. An operation that goes on takes the lock of the cluster again, as soon as
// etcd gives it, and releases it at its end. That is all there is to do.
var letGo = operation.Step{
	ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
	Run: func(context.Context, *operation.Progress) error { return nil },
}

// ended skips the steps up to the one that ends the node.
func ended(steps []operation.Step) {
	end := slices.IndexFunc(steps, func(s operation.Step) bool { return s.EndsNode })
	for i := range steps[:end+1] {
		steps[i].EndsNode = false
		steps[i].Run = func(context.Context, *operation.Progress) error {
			return operation.Skip("the node has ended meanwhile")
		}
	}
}

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

// Pressed are the arguments of an operation that the power button asks for.
func Pressed() PowerArguments { return PowerArguments{Button: true, DrainTimeout: buttonDrain} }

// quorum is the last moment to see that etcd can't do without this node: a drain may
// have taken hours.
func (o Options) quorum(name string) operation.Step {
	return operation.Step{
		ID: "quorum", What: "see that etcd keeps its quorum without this node", Deadline: countTimeout + etcd.SettleTimeout + time.Second,
		Run: func(ctx context.Context, _ *operation.Progress) error {
			warning, err := o.mayStop(ctx, name, false, etcd.SettleTimeout)
			if err == nil && warning != "" {
				return operation.Skip("%s", warning)
			}
			return err
		},
	}
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

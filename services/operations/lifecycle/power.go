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

// Encode makes them the arguments of an operation.
func (a PowerArguments) Encode() []byte { return operation.Encode(a) }

// power is the definition of reboot or shutdown.
type power struct {
	Options
	name string
	how  boot.Power
	hold time.Duration // how long other nodes wait at most for this one
}

func (o Options) reboot() power { return power{o, Reboot, boot.Reboot, holdReboot} }

// shutdown: nobody knows when the node is on again.
func (o Options) shutdown() power { return power{o, Shutdown, boot.PowerOff, holdShutdown} }

func (o power) definition() operation.Definition {
	return operation.Definition{
		Name: o.name, Exclusive: true, Role: "os:operator", WithoutJournal: true,
		Plan: o.plan,
		Steps: func(r operation.Request) ([]operation.Step, error) {
			args, timeout, err := powerArguments(r)
			return o.steps(r, args, timeout), err
		},
	}
}

func powerArguments(r operation.Request) (args PowerArguments, timeout time.Duration, err error) {
	if args, err = operation.Decode[PowerArguments](r); err == nil {
		timeout, err = drainTimeout(args.DrainTimeout)
	}
	return args, timeout, err
}

func (o power) plan(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
	args, timeout, err := powerArguments(r)
	if err != nil {
		return p, err
	}
	warning, err := o.mayStop(ctx, o.name, args.Force || args.Button, 0)
	if err != nil {
		return p, err
	}
	if warning != "" {
		p.Warnings = append(p.Warnings, warning)
	}
	switch {
	case args.Force:
		p.Unlocked = "it is forced"
	case args.Button:
		p.Unlocked = "it was asked for at the machine, or by its host"
	}
	without := map[string]bool{"quorum": args.Button || !o.controlPlane()}
	why := ""
	if !args.Force && !args.KeepPods {
		budget := lookBudget
		if args.Button {
			budget = buttonLook
		}
		why = o.alone(ctx, budget)
	}
	if why != "" {
		p.Warnings = append(p.Warnings, keptPods(why))
	}
	if args.Force || args.KeepPods || why != "" {
		for _, id := range []string{"cordon", "drain", "quorum", "uncordon"} {
			without[id] = true
		}
	}
	p.Steps = slices.DeleteFunc(o.steps(r, args, timeout), func(s operation.Step) bool { return without[s.ID] })
	return p, nil
}

// steps are all that a reboot or a shutdown may have.
//
// What the power button asked for is done once the node has ended, however it did: by a
// second press, or because the time for pods was up. After that the operation must not end
// the node that somebody has turned on again.
func (o power) steps(r operation.Request, args PowerArguments, timeout time.Duration) []operation.Step {
	steps := o.all(r, args, timeout)
	if r.Resuming && args.Button {
		ended(steps)
	}
	return steps
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

func (o power) all(r operation.Request, args PowerArguments, timeout time.Duration) []operation.Step {
	steps := []operation.Step{
		o.cordon(r.ID), o.drain(timeout, true), o.quorum(o.name), o.end(o.how, o.hold, reasonOf(r)), o.back(r.ID),
	}
	if o.how == boot.Reboot && !args.Force {
		steps = append(steps, operation.Step{
			ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
			// An operation that goes on takes the lock of the cluster again, as soon as
			// etcd gives it, and releases it at its end. That is all there is to do.
			Run: func(context.Context, *operation.Progress) error { return nil },
		})
	}
	return steps
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

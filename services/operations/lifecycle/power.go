package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
)

// PowerArguments are what reboot and shutdown are asked with.
type PowerArguments struct {
	// Force: at once, without regard to pods or to other nodes.
	Force bool `json:"force,omitempty"`
	// KeepPods: the node isn't emptied.
	KeepPods     bool          `json:"keepPods,omitempty"`
	DrainTimeout time.Duration `json:"drainTimeout,omitempty"` // 0: DrainTimeout
}

// Encode makes them the arguments of an operation.
func (a PowerArguments) Encode() []byte { return encode(a) }

// encode is for types that JSON has an encoding for.
func encode(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

func (o Options) planReboot(ctx context.Context, r operation.Request) (operation.Plan, error) {
	return o.planPower(ctx, r, Reboot, holdReboot)
}

func (o Options) planShutdown(ctx context.Context, r operation.Request) (operation.Plan, error) {
	return o.planPower(ctx, r, Shutdown, holdShutdown) // nobody knows when it is on again
}

// powers are how the machine ends.
var powers = map[string]boot.Power{Reboot: boot.Reboot, Shutdown: boot.PowerOff}

func (o Options) planPower(ctx context.Context, r operation.Request, name string, hold time.Duration) (p operation.Plan, err error) {
	args, err := decode[PowerArguments](r)
	if err != nil {
		return p, err
	}
	timeout, err := drainTimeout(args.DrainTimeout)
	if err != nil {
		return p, err
	}
	if !r.Resuming {
		warning, err := o.mayStop(ctx, name, args.Force, 0)
		if err != nil {
			return p, err
		}
		if warning != "" {
			p.Warnings = append(p.Warnings, warning)
		}
	}
	if args.Force {
		p.Unlocked = "it is forced"
	} else if !args.KeepPods {
		var warning string
		if p.Steps, warning = o.empty(ctx, r, timeout, true); warning != "" {
			p.Warnings = append(p.Warnings, warning)
		}
	}
	emptied := len(p.Steps) > 0
	if emptied && o.controlPlane() {
		p.Steps = append(p.Steps, o.quorum(name))
	}
	p.Steps = append(p.Steps, o.end(powers[name], hold, reasonOf(r)))
	if emptied {
		p.Steps = append(p.Steps, operation.Step{
			ID: "uncordon", What: "let pods come again, once the node is back", Deadline: backTimeout, Optional: true,
			Run: func(ctx context.Context, p *operation.Progress) error { return o.uncordon(ctx, p, r.ID) },
		})
	}
	if name == Reboot && !args.Force {
		p.Steps = append(p.Steps, operation.Step{
			ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
			// An operation that goes on takes the lock of the cluster again, as soon as
			// etcd gives it, and releases it at its end. That is all there is to do.
			Run: func(context.Context, *operation.Progress) error { return nil },
		})
	}
	return p, nil
}

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

// MayReboot is what operation reboot asks first, for who reboots the node otherwise. Its
// caller waits for no more than one request.
func (o Options) MayReboot(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := o.mayStop(bounded, Reboot, false, 0)
	if err == nil && ctx.Err() != nil {
		err = ctx.Err() // who was called off has seen nothing
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

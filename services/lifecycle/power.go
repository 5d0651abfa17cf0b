package lifecycle

import (
	"context"
	"encoding/json"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/operation"
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
	return o.planPower(ctx, r, boot.Reboot, holdReboot)
}

func (o Options) planShutdown(ctx context.Context, r operation.Request) (operation.Plan, error) {
	return o.planPower(ctx, r, boot.PowerOff, 0) // nobody knows when it is on again
}

func (o Options) planPower(ctx context.Context, r operation.Request, power boot.Power, hold time.Duration) (p operation.Plan, err error) {
	args, err := decode[PowerArguments](r)
	if err != nil {
		return p, err
	}
	timeout, err := drainTimeout(args.DrainTimeout)
	if err != nil {
		return p, err
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
	p.Steps = append(p.Steps, o.end(power, hold, reasonOf(r)))
	if emptied {
		p.Steps = append(p.Steps, operation.Step{
			ID: "uncordon", What: "let pods come again, once the node is back", Deadline: backTimeout, Optional: true,
			Run: func(ctx context.Context, p *operation.Progress) error { return o.uncordon(ctx, p, r.ID) },
		})
	}
	if hold > 0 && !args.Force {
		p.Steps = append(p.Steps, operation.Step{
			ID: "back", What: "let other nodes go, once this one is back", Deadline: changeTimeout, Optional: true,
			// An operation that goes on takes the lock of the cluster again, as soon as
			// etcd gives it, and releases it at its end. That is all there is to do.
			Run: func(context.Context, *operation.Progress) error { return nil },
		})
	}
	return p, nil
}

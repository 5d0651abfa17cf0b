// Package configuration finds the node's configuration and publishes it.
//
// It is the service `machined`: the root of everything that depends on what the
// node should be. It looks at the sources of package boot/source in their order, checks
// what it finds, and puts it into the resource store, where every other service
// reads it. A machine without a configuration, or with a broken one, says so on
// its console and keeps looking, and takes one over the API: it never guesses.
// The Applier changes the configuration while the node runs.
package configuration

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// ID of the service.
	ID = "machined"
	// ConfigID names the one machine configuration.
	ConfigID = "v1alpha1"

	retryFirst = 2 * time.Second
	retryMax   = 30 * time.Second // a person may be writing the disk or the server meanwhile
)

// Configs is the applied machine configuration.
var Configs = resource.Define[*config.Config](resource.Definition{
	Type:      "MachineConfigs.config.garboard.dev",
	Kind:      "MachineConfig",
	Aliases:   []string{"mc"},
	Namespace: "config",
})

// Config is the applied configuration, for those that run after machined.
func Config(r resource.Reader) (*config.Config, error) {
	o, err := Configs.Get(r, ConfigID)
	if err != nil {
		return nil, fmt.Errorf("machine configuration: %w", err)
	}
	return o.Spec, nil
}

// Wanted is a part of the configuration. Before there is one, nothing is wanted.
func Wanted[T any](r resource.Reader, part func(*config.Config) T) (wanted T, err error) {
	c, err := Config(r)
	if err != nil {
		return wanted, resource.IgnoreNotFound(err)
	}
	return part(c), nil
}

// Options are what the service stands on.
type Options struct {
	Store   *resource.Store
	Applier *Applier
	Sources []source.Source
	// MountState mounts STATE where the machine has one already; nil where it is
	// always there.
	MountState func(ctx context.Context) (State, error)
	Installed  bool // this boot is from a disk on which the system was installed
	// Unlocked says that STATE can be mounted now.
	Unlocked <-chan struct{}
}

// Service is machined in the graph.
func Service(o Options) dag.Service {
	return dag.Service{
		ID:      ID,
		Run:     o.run,
		Restart: dag.RestartAlways,
	}
}

// Why the node is in maintenance mode.
const (
	ConfigurationAbsent   reason.Code = "ConfigurationAbsent"   // no source has one
	ConfigurationUnusable reason.Code = "ConfigurationUnusable" // one has, and it can't be read or used
	StateIsLocked         reason.Code = "StateIsLocked"         // no key of this machine opens STATE, where it is
)

func (o Options) run(ctx context.Context, h *dag.Handle) error {
	return dag.While(ctx, func(ctx context.Context) error {
		from, err := o.findConfig(ctx, h)
		if err != nil {
			return err
		}
		// One from the API is out a moment after its answer; who depends on machined reads it.
		if err := Configs.When(o.Store, ConfigID, "the configuration to be published", nil).Wait(ctx); err != nil {
			return err
		}
		h.Started("configuration from " + from)
		<-ctx.Done()
		return nil
	}, func(ctx context.Context) error {
		return dag.Guard(h.Log, func() error { o.Applier.run(ctx); return nil })
	})
}

// findConfig returns once there is a configuration, from a source or over the API.
func (o Options) findConfig(ctx context.Context, h *dag.Handle) (from string, err error) {
	wait, reported := retryFirst, ""
	for {
		source, known, err := o.find(ctx)
		if err == nil {
			return source, nil
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		also, stage := ", and waiting for one over the API", Maintenance
		if open, closed := mayOpenMaintenance(known); !open {
			also, stage = "; maintenance mode stays closed: "+closed, Searching
		}
		if known.state == StateLocked {
			also, stage = ": waiting for its recovery key (gbctl -n ADDRESS unlock --insecure, or unlock at the console)", Locked
		}
		// Once per finding: the service graph reports every few seconds what it waits for,
		// and since when.
		if why := err.Error() + also; why != reported {
			reported = why
			if err := o.Applier.maintain(stage); err != nil {
				return "", err
			}
			code := ConfigurationUnusable
			if known.state == StateLocked {
				code = StateIsLocked
			}
			if errors.Is(err, boot.ErrNone) {
				code = ConfigurationAbsent
			}
			h.EventOf(code, fmt.Sprintf("no usable configuration: %v; looking again in %s, later at least every %s%s", err, wait, retryMax, also))
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-o.Applier.given:
			return "the API", nil
		case <-o.Unlocked:
		case <-time.After(wait):
		}
		wait = sleep.Longer(wait, retryFirst, retryMax)
	}
}

func (o Options) find(ctx context.Context) (from string, known facts, err error) {
	known = facts{installed: o.Installed, trial: o.Applier.o.Trial && !o.Applier.o.Back}
	if err := o.mountState(ctx, &known); err != nil {
		return "", known, err
	}
	found, err := source.Find(ctx, o.Sources)
	own := found.Source == source.State
	if err != nil && own { // its disk has an error: the history of the configuration may be readable
		o.Applier.o.Log.Error(err.Error())
		if e := o.Applier.begin(found.Source, nil); e != nil {
			known.text = textLost
			return "", known, err
		}
		return found.Source, known, nil
	}
	if err == nil {
		err = o.Applier.begin(found.Source, found.Data)
	}
	if err != nil && own {
		known.text = textBroken
	}
	if err == nil || own || errors.Is(err, boot.ErrNone) {
		return found.Source, known, err
	}
	if e := o.mountState(ctx, &known); e != nil { // it may have come meanwhile
		return "", known, e
	}
	known.elsewhere, known.had = true, o.Applier.hadOne()
	return "", known, err
}

// mountState prepares STATE, if it is there.
func (o Options) mountState(ctx context.Context, known *facts) (err error) {
	if o.MountState == nil {
		return nil
	}
	if known.state, err = o.MountState(ctx); err != nil {
		return fmt.Errorf("mount STATE: %w", err)
	}
	if known.state == StateMounted {
		err = o.Applier.stateFound()
		known.unsettled = err != nil
	}
	return err
}

// OnControlPlanes skips a service on workers, and says why.
func OnControlPlanes(r resource.Reader, why string) func() string {
	return func() string {
		cfg, err := Config(r)
		if err != nil || cfg.Machine.Type.ControlPlane() {
			return ""
		}
		return why
	}
}

// IfControlPlane is a condition of a service that OnControlPlanes skips on workers: there it
// holds as soon as the configuration is known.
type IfControlPlane struct {
	dag.Condition
	Store *resource.Store
}

// Wait implements dag.Condition.
func (c IfControlPlane) Wait(ctx context.Context) error {
	if err := Configs.When(c.Store, ConfigID, "a configuration", nil).Wait(ctx); err != nil {
		return err
	}
	if OnControlPlanes(c.Store, "a worker")() != "" {
		return nil
	}
	return c.Condition.Wait(ctx)
}

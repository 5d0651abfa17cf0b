// Package machine finds the node's configuration and publishes it.
//
// It is the service `machined`: the root of everything that depends on what the
// node should be. It looks at the sources of package boot in their order, checks
// what it finds, and puts it into the resource store, where every other service
// reads it. A machine without a configuration, or with a broken one, says so on
// its console and keeps looking: it never guesses.
package machine

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/dag"
	"github.com/garboard-os/garboard/services/resource"
)

const (
	// ID of the service.
	ID = "machined"
	// ConfigID names the one machine configuration.
	ConfigID = "v1alpha1"

	retryFirst = 2 * time.Second
	retryMax   = 30 * time.Second // a person may be writing the disk or the server meanwhile
)

// Configs is the applied machine configuration (acceptance S-269).
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

// Options are what the service stands on.
type Options struct {
	Store   *resource.Store
	Sources []boot.Source
	// MountState mounts STATE where the machine has one already; nil where it is
	// always there.
	MountState func(ctx context.Context) (found bool, err error)
}

// Service is machined in the graph.
func Service(o Options) dag.Service {
	return dag.Service{
		ID:        ID,
		DependsOn: []string{"udevd"},
		Run:       o.run,
		Restart:   dag.RestartAlways,
	}
}

func (o Options) run(ctx context.Context, h *dag.Handle) error {
	wait, said := retryFirst, ""
	for {
		source, err := o.find(ctx, h)
		if err == nil {
			h.Started("configuration from " + source)
			break
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// Once per finding: what it waits for, and since when, is told every few
		// seconds in any case.
		if why := err.Error(); why != said {
			said = why
			if err := Stages.Put(o.Store.As(ID), StageID, Maintenance); err != nil {
				return err
			}
			h.Event(fmt.Sprintf("no usable configuration: %v; looking again in %s, later at least every %s", err, wait, retryMax))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		wait = min(wait*2, retryMax)
	}
	<-ctx.Done()
	return nil
}

func (o Options) find(ctx context.Context, h *dag.Handle) (source string, err error) {
	if o.MountState != nil {
		if _, err := o.MountState(ctx); err != nil {
			return "", fmt.Errorf("mount STATE: %w", err)
		}
	}
	found, err := boot.Find(ctx, o.Sources)
	if err != nil {
		return "", err
	}
	cfg, warnings, err := config.Load(found.Source, found.Data)
	if err != nil {
		return "", err
	}
	for _, w := range warnings {
		h.Log.Warn("configuration: " + w.String())
	}
	if err := Configs.Put(o.Store.As(ID), ConfigID, cfg); err != nil {
		return "", err
	}
	return found.Source, Stages.Put(o.Store.As(ID), StageID, Configured)
}

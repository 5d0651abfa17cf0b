package slots

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
)

// ServiceOptions are what the service stands on.
type ServiceOptions struct {
	Mode  boot.Mode
	Slots *Slots
	// Install installs this machine from an image, or from the medium in it, and restarts it: it returns when the node ends, or earlier
	// with the reason why it isn't installed.
	Install func(ctx context.Context, image string) error
}

// again is the pause before a machine tries again to install itself from an image.
const again = 5 * time.Minute

// Service is slots in the graph. It is up when it is known which system this boot runs. A machine that was booted from a medium, and has
// no system on its disk, is installed first, and never gets further. If its configuration has an image, it is installed from that, once
// containerd runs.
func Service(o ServiceOptions) dag.Service {
	return dag.Service{ID: ID, Restart: dag.RestartOnError, Run: func(ctx context.Context, h *dag.Handle) error {
		message, image := "a container has no slots", ""
		if o.Mode == boot.Machine {
			message, image = o.begin(ctx, h)
		}
		if ctx.Err() == nil {
			h.Started(message)
		}
		for image != "" && ctx.Err() == nil {
			if err := o.Install(ctx, image); ctx.Err() == nil {
				h.Log.Error("this machine isn't installed", "image", image, "err", err, "next try in", again)
			}
			sleep.For(ctx, again)
		}
		<-ctx.Done()
		return nil
	}}
}

// begin returns what the users of this machine should know, and the image that it is to be installed from. Nothing that is wrong with the
// slots keeps the node from running.
func (o ServiceOptions) begin(ctx context.Context, h *dag.Handle) (message, image string) {
	if err := o.Slots.Begin(ctx); err != nil {
		h.Log.Error("the slots of the system disk can't be used", "err", err)
		return "the slots of the system disk can't be used: " + err.Error(), ""
	}
	slots, err := o.Slots.Get()
	if err != nil {
		return err.Error(), ""
	}
	if running, err := slots.Of(o.Slots.Running()); err == nil {
		return fmt.Sprintf("Garboard %s runs from slot %s, which is %s", running.Version, o.Slots.Running(), running.State), ""
	}
	if next := slots.Next(); next != "" {
		return fmt.Sprintf("the machine was booted from a medium or over the network; slot %s of its disk has a system, which doesn't run", next), ""
	}
	if cfg, err := machine.Config(o.Slots.o.Store); err == nil && cfg.Machine.Install.Image != "" {
		return "the machine will be installed from " + cfg.Machine.Install.Image, cfg.Machine.Install.Image
	}
	src, err := o.Slots.Medium(ctx)
	if errors.Is(err, ErrNoMedium) {
		return "the machine was booted without a medium that it could be installed from, and needs the same at each boot: see machine.install.image", ""
	}
	if err == nil {
		h.Event("installing " + src.String())
		err = o.Install(ctx, "")
	}
	if ctx.Err() != nil {
		return "", ""
	}
	h.Log.Error("this machine isn't installed", "err", err)
	return "the machine runs from its medium, and isn't installed: " + err.Error(), ""
}

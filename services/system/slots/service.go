package slots

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// ServiceOptions are what the service stands on.
type ServiceOptions struct {
	Mode  boot.Mode
	Slots *Slots
	// Install installs this machine from an image, or from the medium in it, and restarts it: it returns when the node
	// ends, or earlier with the reason why it isn't installed.
	Install func(ctx context.Context, image string) error
}

// A machine that couldn't install itself from an image tries again after a pause. Each pause is twice as long as the
// last.
const (
	firstPause = 5 * time.Minute
	maxPause   = 2 * time.Hour
)

// beginAgain is between two tries to use the slots. Without them, an upgrade doesn't end.
const beginAgain = 30 * time.Second

// Service is slots in the graph. It is up when it is known which system this boot runs. A machine that was booted from
// a medium, and has no system on its disk, is installed first, and never gets further. If its configuration has an
// image, it is installed from that, once containerd runs.
func Service(o ServiceOptions) dag.Service {
	return dag.Service{ID: ID, Restart: dag.RestartOnError, Run: func(ctx context.Context, h *dag.Handle) error {
		message, image := "a container has no slots", ""
		if o.Mode == boot.Machine {
			message, image = o.begin(ctx, h)
		}
		if ctx.Err() == nil {
			h.Started(message)
			if o.Mode == boot.Machine {
				o.Slots.secure(ctx)
			}
		}
		for pause := firstPause; image != "" && ctx.Err() == nil; pause = min(2*pause, maxPause) {
			if err := o.Install(ctx, image); ctx.Err() == nil {
				h.Log.Error("this machine isn't installed", "image", image, "err", err, "next try in", pause)
			}
			image = o.Slots.configured(ctx, image, pause)
		}
		for o.Mode == boot.Machine && !o.Slots.Begun() && sleep.For(ctx, beginAgain) {
			if err := o.Slots.Begin(ctx); err == nil {
				h.Event("the slots of the system disk can be used")
			}
		}
		<-ctx.Done()
		return nil
	}}
}

// image is the one of the configuration.
func (s *Slots) image() string {
	if cfg, err := configuration.Config(s.o.Store); err == nil {
		return cfg.Machine.Install.Image
	}
	return ""
}

// configured is the image once the pause is over, or once the configuration has another one than before.
func (s *Slots) configured(ctx context.Context, before string, pause time.Duration) string {
	ctx, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	changes := s.o.Store.Watch(ctx, configuration.Configs.Type())
	for ctx.Err() == nil && s.image() == before {
		select {
		case <-changes:
		case <-ctx.Done():
		}
	}
	return s.image()
}

// begin returns what the users of this machine should know, and the image that it is to be installed from. Nothing that
// is wrong with the slots keeps the node from running.
func (o ServiceOptions) begin(ctx context.Context, h *dag.Handle) (message, image string) {
	if err := o.Slots.Begin(ctx); err != nil {
		h.Log.Error("the slots of the system disk can't be used", "err", err)
		return "the slots of the system disk can't be used: " + err.Error(), ""
	}
	slots, err := o.Slots.Get()
	if err != nil {
		return err.Error(), ""
	}
	if name := o.Slots.Running(); name != "" {
		return fmt.Sprintf("Garboard %s runs from slot %s, which is %s", slots.Of(name).Version, name, slots.Of(name).State), ""
	}
	if next := slots.Next(); next != "" {
		return fmt.Sprintf("the machine was booted from a medium or over the network; slot %s of its disk has a system, which doesn't run", next), ""
	}
	if image := o.Slots.image(); image != "" {
		return "the machine will be installed from " + image, image
	}
	src, err := o.Slots.Medium(ctx, false)
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

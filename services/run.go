package services

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/front/console"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// unlockBudget is for a recovery key that is typed at the console: others may be tried before it.
const unlockBudget = 2 * time.Minute

// Run runs the node until ctx is cancelled and everything has stopped, services
// in reverse order of their dependencies.
func (n *Node) Run(ctx context.Context) error {
	// The controllers go on while services stop: a service may still want what
	// they make. They end last.
	rctx, stopControllers := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := n.runtime.Run(rctx); err != nil && rctx.Err() == nil {
			n.logs.Logger("controller-runtime").Error("controllers ended", slog.Any("err", err))
		}
	})
	wg.Go(func() {
		if err := n.api.Run(rctx); err != nil {
			n.logs.Logger(api.LogID).Error("the machine API ended", slog.Any("err", err))
		}
	})
	wg.Go(func() {
		// With the first service that stops: what runs goes on after the next boot.
		if err := n.ops.Run(ctx); err != nil {
			n.logs.Logger(operation.ID).Warn(err.Error())
		}
	})
	wg.Go(func() { n.forward.Run(rctx) })
	screen := console.Options{
		Store: n.Store, Log: n.logs.Logger(console.ID), Network: n.network.Use, Problems: n.doctor.Known, Fingerprint: n.fingerprint.Text,
		Waiting: func() []string { return n.report.waiting(n.report.since()) },
		Ending:  func() bool { return ctx.Err() != nil },
		Signal:  func(s syscall.Signal) error { return syscall.Kill(os.Getpid(), s) },
		Unlock: func(key string) error {
			ctx, cancel := context.WithTimeout(rctx, unlockBudget)
			defer cancel()
			return n.disks.Unlock(ctx, key)
		},
		Wipe: n.disks.WipeLocked,
	}
	if n.report.mode == boot.Container { // its kernel is its host's
		wg.Go(func() { console.Show(rctx, screen, n.logs.Screen()) })
	} else {
		wg.Go(func() { console.Run(rctx, screen) })
		wg.Go(func() {
			if err := n.logs.FollowKernel(rctx, logs.KmsgDevice, n.report.since); err != nil && rctx.Err() == nil {
				n.logs.Logger(configuration.ID).Warn("the kernel's messages aren't logged any more", "err", err.Error())
			}
		})
	}
	events := n.graph.Subscribe(rctx)
	wg.Go(func() { n.report.run(rctx, events) })
	wg.Go(func() { n.prove(ctx, n.slots) })
	err := n.graph.Run(ctx)
	stopControllers()
	wg.Wait()
	return err
}

// End ends the machine as `gbctl reboot` and `gbctl shutdown` do, for somebody at the machine
// or its host: within lifecycle.PressBudget its services stop. It returns once that is under
// way; an error means that it isn't.
func (n *Node) End(ctx context.Context, p boot.Power, why string) error {
	_, err := n.ops.Start(ctx, lifecycle.Pressed(p, why))
	return err
}

// Marked tells whether a reset has marked anything that Erase wipes once all has stopped.
func (n *Node) Marked() bool { return n.disks.Marked() }

// EraseTime is how much longer Erase may take than usual.
func (n *Node) EraseTime() time.Duration { return n.disks.EraseTime() }

// Erase is that of the disks.
func (n *Node) Erase(ctx context.Context) error { return n.disks.Erase(ctx) }

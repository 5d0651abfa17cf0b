package services

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/extension"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/slots"
)

// reachable are the services that a machine needs for a person to repair the rest. A system that has no other one to go
// back to is good when they are up: a new control plane waits for `gbctl bootstrap`, however long that takes.
var reachable = []string{network.ID, configuration.ID, disks.ID, slots.ID, apid.ID}

// proveEvery is how often a new system is looked at. It is healthy after healthyLooks in a row.
const (
	proveEvery   = time.Second
	healthyLooks = 5
	// stuckTimeout is for a disk that doesn't answer at all, on which everything waits that looks at the slots or
	// writes to them.
	stuckTimeout = 5 * time.Minute
)

// install runs the operation, and returns an error if the machine isn't installed by it. From a medium, that is before
// anything else runs.
func (n *Node) install(ctx context.Context, image string) error {
	ask := operation.Ask{Name: lifecycle.Install, By: "the first boot from a medium", Arguments: &apiv1.InstallSystemRequest{Force: true}}
	if image != "" {
		ask.By, ask.Arguments = "machine.install.image", &apiv1.InstallSystemRequest{Image: image}
		if err := n.graph.Up(containerd.ID).Wait(ctx); err != nil {
			return err
		}
	}
	begun, err := n.ops.Start(ctx, ask)
	if err != nil {
		return err
	}
	var last operation.Operation
	if err := n.ops.Watch(ctx, begun.ID, 0, func(u operation.Update) error { last = u.Operation; return nil }); err != nil {
		return err
	}
	if last.State == operation.Failed || last.State == operation.Aborted {
		return errors.New(last.Error)
	}
	return nil
}

// own are the services of the release. Those of extensions may wait for what a machine doesn't have, and no upgrade is
// undone for that.
func own(all []dag.Status) []dag.Status {
	return slices.DeleteFunc(all, func(s dag.Status) bool { return strings.HasPrefix(s.ID, extension.Prefix) })
}

// lacks are the services and static pods that aren't up, and what Kubernetes finds wrong with the node: the one
// definition of healthy. The object of each is the same after an upgrade.
func (n *Node) lacks(kubernetes bool) (all kubelet.Faults) {
	lack := func(name string) { all = append(all, kubelet.Fault{Object: name, Text: name}) }
	for _, s := range own(n.graph.Statuses()) {
		if !s.Up || s.Health == dag.HealthFail {
			lack(s.ID)
		}
	}
	if cfg, err := configuration.Config(n.Store); err == nil && cfg.Machine.Type.ControlPlane() && len(controlplane.StaticPods.List(n.Store)) == 0 && !controlplane.SelfHosted(n.Store) {
		lack("static pods") // they aren't made yet, or there is no cluster
	}
	for _, reason := range controlplane.Unready(n.Store) {
		name, _, _ := strings.Cut(reason, ":")
		lack(name)
	}
	if kubernetes {
		all = append(all, kubelet.Health(n.Store).Faults...)
	}
	return all
}

// unhealthy are the names of what isn't up.
func (n *Node) unhealthy() []string {
	return lists.Of(n.lacks(true), func(f kubelet.Fault) string { return f.Object })
}

// proving are the slots, as far as a new system proves itself with them.
type proving interface {
	Running() string
	Fallback() bool
	Get() (boot.Slots, error)
	Prove(ctx context.Context, reason string) error
	Fail(ctx context.Context, reason string) error
}

// prove makes a new system good when it is healthy, or goes back to the former one when its time is up.
func (n *Node) prove(ctx context.Context, system proving) {
	if system.Running() == "" {
		return
	}
	if system.Fallback() {
		longest := lifecycle.ProveTimeout(boot.Slot{Wiped: true}) + stuckTimeout
		stuck := time.AfterFunc(longest, func() {
			if status, err := slots.Statuses.Get(n.Store, system.Running()); err == nil && status.Spec.State == boot.SlotGood {
				return // only the boot loader doesn't know it yet
			}
			n.power(boot.Reboot, fmt.Sprintf("the system on trial goes: it is neither good nor bad after %s, because its disk doesn't answer", longest))
		})
		defer stuck.Stop()
	}
	began, looks := time.Now(), 0
	var failed error // of what was to be written; it is tried again
	told := ""
	for sleep.For(ctx, proveEvery) {
		if failed != nil && failed.Error() != told {
			told = failed.Error()
			n.logs.Printf("slot %s: %s", system.Running(), told)
		}
		if status, err := slots.Statuses.Get(n.Store, system.Running()); err == nil && status.Spec.State != boot.SlotTrying && failed == nil {
			return
		}
		running, waiting := n.unproven(system)
		if len(waiting) > 0 {
			looks = 0
		} else if looks++; looks >= healthyLooks {
			if failed = system.Prove(ctx, "healthy "+time.Since(began).Round(time.Second).String()+" after its boot"); failed == nil {
				n.logs.Printf("slot %s is good: Garboard %s is healthy", system.Running(), boot.Version)
				return
			}
		}
		if limit := lifecycle.ProveTimeout(running); time.Since(began) > limit && len(waiting) > 0 && running.State != boot.SlotGood {
			why := fmt.Sprintf("not healthy within %s: %s", limit, strings.Join(waiting, ", "))
			// The boot loader has used the one boot of this system: the former one runs, too, where nothing can be
			// written.
			if failed = system.Fail(ctx, why); failed == nil || system.Fallback() {
				n.power(boot.Reboot, "the system on trial goes: "+why)
				return
			}
		}
	}
}

// unproven is the running system, as far as its disk is there, with what it must have up, and hasn't. One that META
// has as good needs nothing any more: only the boot loader doesn't know it yet, and would take its trial for failed.
func (n *Node) unproven(system proving) (running boot.Slot, waiting []string) {
	all, err := system.Get()
	if err != nil {
		waiting = []string{err.Error()}
	}
	running = *all.Of(system.Running())
	if running.State == boot.SlotGood {
		return running, nil
	}
	for _, l := range n.lacks(running.Kubernetes) {
		if !slices.Contains(running.Excused, l.Object) && (!all.Alone() || slices.Contains(reachable, l.Object)) {
			waiting = append(waiting, l.Text)
		}
	}
	return running, slices.Compact(waiting)
}

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/slots"
)

// Names of the operations that change the system in a slot. Each ends with a boot of that slot:
//
//	install, upgrade   pull or find ─▶ verify ─▶ images (upgrade) ─▶ write ─▶ cordon ─▶ drain ─▶ quorum ─▶ end ══▶ uncordon ─▶ back ─▶ prove
//	rollback                                      cordon ─▶ drain ─▶ quorum ─▶ choose ─▶ end ══▶ uncordon ─▶ back ─▶ prove
//
// If the system of that slot doesn't become healthy, the machine boots the other one, which fails the operation with the reason.
const (
	Install  = "install"
	Upgrade  = "upgrade"
	Rollback = "rollback"
)

const (
	pullTimeout = 20 * time.Minute
	// verifyTimeout and writeTimeout are for a medium of 260 MB at 0.5 MB/s, such as a virtual CD.
	verifyTimeout = 10 * time.Minute
	writeTimeout  = 10 * time.Minute
	chooseTimeout = time.Minute
	// proveTimeout is how long a new system may take to become healthy, and wipedTimeout is for one that pulls all images first.
	proveTimeout = 10 * time.Minute
	wipedTimeout = proveTimeout + pullTimeout
	// proveGrace is for the way back to the former system.
	proveGrace = 20 * time.Minute
	provePoll  = time.Second
)

// ProveTimeout is how long the system in a slot may take to become healthy.
func ProveTimeout(slot boot.Slot) time.Duration {
	if slot.Wiped {
		return wipedTimeout
	}
	return proveTimeout
}

// Systems are the slots of this machine.
type Systems interface {
	Running() string
	Trial() bool
	Begun() bool
	Where() (string, error)
	Get() (boot.Slots, error)
	Medium(ctx context.Context, older bool) (slots.Source, error)
	Pull(ctx context.Context, image string, older bool, report func(done, of int64)) (slots.Source, error)
	Verify(ctx context.Context, src slots.Source, report func(done, of int64)) error
	Write(ctx context.Context, name string, src slots.Source, system boot.Slot, report func(done, of int64)) error
	Empty(ctx context.Context, name string) error
	Rollback(ctx context.Context, reason string, excused []string) error
	Stay(ctx context.Context) error
}

// errNoSlots refuses what only a machine can do.
var errNoSlots = errors.New("this node is a container: its host has its system")

// target is the slot that an operation writes; source is what it writes there. marked is whether EPHEMERAL is wiped before it runs. sick are
// the services that weren't healthy when the operation began: after a restart, others aren't up yet.
var (
	target = operation.Data[string]{Key: "slot"}
	source = operation.Data[slots.Source]{Key: "source"}
	marked = operation.Data[bool]{Key: "marked"}
	sick   = operation.Data[[]string]{Key: "sick"}
)

func (o Options) mayInstall() error {
	if o.Systems == nil {
		return errNoSlots
	}
	if slot := o.Systems.Running(); slot != "" {
		return fmt.Errorf("this machine runs from slot %s of its disk: it is installed. A new system comes with `gbctl upgrade`", slot)
	}
	all, err := o.Systems.Get()
	if err != nil {
		return err
	}
	if slot := all.Next(); slot != "" {
		return fmt.Errorf("the disk of this machine has a system in slot %s: remove the medium, and restart the machine", slot)
	}
	return nil
}

// write are the steps up to a complete system in a slot. It comes from an image, or from the medium in the machine.
func (o Options) write(r operation.Request, args PowerArguments) []operation.Step {
	get := operation.Step{ID: "find", What: "find the system on the medium", Deadline: verifyTimeout}
	if args.Image != "" {
		get = operation.Step{ID: "pull", What: "pull the image " + args.Image, Deadline: pullTimeout}
	}
	get.Run = func(ctx context.Context, p *operation.Progress) (err error) {
		var src slots.Source
		if args.Image == "" {
			src, err = o.Systems.Medium(ctx, args.Older)
		} else {
			src, err = o.Systems.Pull(ctx, args.Image, args.Older, percent(p, "pulled"))
		}
		if err != nil {
			return err
		}
		return source.Put(p, src)
	}
	all := []operation.Step{
		get,
		{
			ID: "verify", What: "read the system, and compare its checksum", Deadline: verifyTimeout,
			Run: source.Then(func(ctx context.Context, p *operation.Progress, src slots.Source) error {
				p.Report("%s", src)
				if err := o.Systems.Verify(ctx, src, percent(p, "read")); err != nil {
					return err
				}
				all, err := o.Systems.Get()
				if err != nil {
					return err
				}
				return target.Put(p, all.Target(o.Systems.Running()))
			}),
		},
		{
			ID: "write", What: "write the system to the slot that doesn't run", Deadline: writeTimeout,
			Run: source.Then(func(ctx context.Context, p *operation.Progress, src slots.Source) error {
				slot, err := target.Get(p)
				if err != nil || slot == o.Systems.Running() { // it was written, and the machine has restarted
					return err
				}
				system := boot.Slot{Wiped: args.Wipe}
				if o.Systems.Running() != "" {
					system.Excused = o.excused(p)
				}
				if cfg, err := machine.Config(o.Store); err == nil {
					system.Args = cfg.Machine.Install.ExtraKernelArgs
				}
				p.Report("to slot %s", slot)
				return o.Systems.Write(ctx, slot, src, system, percent(p, "written"))
			}),
			Undo: target.Then(func(ctx context.Context, _ *operation.Progress, slot string) error {
				if slot == o.Systems.Running() {
					return fmt.Errorf("the machine has restarted, with the new system in slot %s, which stays if it is healthy: `gbctl rollback` goes back to the former one", slot)
				}
				return o.Systems.Empty(ctx, slot)
			}),
		},
	}
	for i := range all {
		run := all[i].Run
		all[i].Run = func(ctx context.Context, p *operation.Progress) (err error) {
			if i == 0 {
				err = o.remember(r, p)
			}
			if err == nil && args.Image != "" {
				_, err = o.containerd(ctx, p)
			}
			if err == nil {
				err = run(ctx, p)
			}
			return err
		}
	}
	return all
}

// remember keeps what isn't healthy where an operation begins.
func (o Options) remember(r operation.Request, p *operation.Progress) error {
	if r.Resuming || o.Unhealthy == nil {
		return nil
	}
	return sick.Put(p, o.Unhealthy())
}

// excused are the services that weren't healthy then, and still aren't. Nothing is excused in an operation that was cut short before it knew.
func (o Options) excused(p *operation.Progress) []string {
	before, err := sick.Get(p)
	if err != nil || o.Unhealthy == nil {
		return nil
	}
	still := o.Unhealthy()
	return slices.DeleteFunc(before, func(name string) bool { return !slices.Contains(still, name) })
}

// containerd waits for containerd, which starts again after a restart of the node. One that wasn't healthy before isn't waited for.
func (o Options) containerd(ctx context.Context, p *operation.Progress) (there bool, err error) {
	before, _ := sick.Get(p)
	for told := false; o.Unhealthy != nil && slices.Contains(o.Unhealthy(), containerd.ID); told = true {
		if slices.Contains(before, containerd.ID) {
			return false, nil
		}
		if !told {
			p.Report("waits for containerd")
		}
		if !sleep.For(ctx, provePoll) {
			return false, ctx.Err()
		}
	}
	return true, nil
}

// images pulls what the new system runs pods with, before anything is written. Otherwise no pod would start with that system, in a place
// where it can't pull.
func (o Options) images() operation.Step {
	return operation.Step{
		ID: "images", What: "pull the images that the system runs pods with", Deadline: pullTimeout,
		Run: source.Then(func(ctx context.Context, p *operation.Progress, src slots.Source) error {
			if there, err := o.containerd(ctx, p); err != nil {
				return err
			} else if !there {
				p.Report("nothing is pulled: containerd wasn't healthy, and the upgrade may be to repair it")
				return nil
			}
			for _, image := range src.Images {
				if err := o.Pull(ctx, image); err != nil {
					return fmt.Errorf("this machine can't get an image that Garboard %s runs pods with: %w", src.Version, err)
				}
			}
			return nil
		}),
	}
}

// sayWhere puts the place of the system into the plan that users see.
func (o Options) sayWhere(steps []operation.Step) error {
	where, err := o.Systems.Where()
	at := slices.IndexFunc(steps, func(s operation.Step) bool { return s.ID == "write" })
	steps[at].What = "write the system to " + where
	return err
}

// percent reports each fifth of the way. An image's pull begins with a few kB, which say how much there is.
func percent(p *operation.Progress, word string) func(done, of int64) {
	const mb = 1_000_000
	told, whole := int64(0), int64(0)
	return func(done, of int64) {
		if of != whole {
			told, whole = 0, of
		}
		if part := done * 5 / max(of, 1); part > told && of >= mb {
			told = part
			p.Report("%d%% of %d MB %s", part*20, of/mb, word)
		}
	}
}

// prove waits until it is known whether the system in the target is healthy. It runs after the boot, in that system or in the other one.
func (o Options) prove(args PowerArguments) operation.Step {
	return operation.Step{
		ID: "prove", What: "see that the system is healthy", Deadline: ProveTimeout(boot.Slot{Wiped: args.Wipe}) + proveGrace,
		Run: func(ctx context.Context, p *operation.Progress) error {
			name, err := target.Get(p)
			if err != nil {
				return fmt.Errorf("the machine restarted before this operation chose a system: start it again (%w)", err)
			}
			for {
				begun := o.Systems.Begun() // before it has, the slots don't say what became of the new system
				all, err := o.Systems.Get()
				if err != nil {
					return err
				}
				slot, err := all.Of(name)
				if err != nil {
					return err
				}
				switch {
				case !begun:
				case slot.State == boot.SlotGood && o.Systems.Running() == name:
					if _, err := marked.Get(p); args.Wipe && err != nil {
						return errors.New("the new system is healthy, but the machine restarted before the data was marked for wiping: `gbctl reset --system-labels-to-wipe EPHEMERAL --reboot` wipes it")
					}
					return nil
				case slot.State == boot.SlotTrying && o.Systems.Running() == name:
				case slot.State == boot.SlotTrying && slot.Tries > 0:
					return fmt.Errorf("the machine wasn't started from slot %s of its disk: remove the medium, or let the firmware start the disk first", name)
				default:
					return fmt.Errorf("slot %s is %s: %s. The machine runs the system in slot %s", name, slot.State, slot.Reason, o.Systems.Running())
				}
				if !sleep.For(ctx, provePoll) {
					return ctx.Err()
				}
			}
		},
	}
}

// changed is the reboot with another system. Whoever chooses what runs on a node can do all.
func (o Options) changed(name string) operation.Definition {
	d := power{o, name, boot.Reboot, holdReboot}.definition()
	d.WithoutJournal, d.Role = false, "os:admin"
	return d
}

func (o Options) install() operation.Definition { return o.replace(Install, o.mayInstall) }
func (o Options) upgrade() operation.Definition { return o.replace(Upgrade, o.mayUpgrade) }

// replace writes a system, and restarts the machine from it.
func (o Options) replace(name string, may func() error) operation.Definition {
	d := o.changed(name)
	plan, steps := d.Plan, d.Steps
	write := func(r operation.Request, args PowerArguments) []operation.Step {
		all := o.write(r, args)
		if name == Upgrade { // a machine that isn't installed may have no containerd
			all = slices.Insert(all, len(all)-1, o.images())
		}
		return all
	}
	// Pods may come again to either system, so that is before it is known which one stays.
	around := func(r operation.Request, all []operation.Step) ([]operation.Step, error) {
		args, timeout, err := powerArguments(r)
		if args.Stage {
			return write(r, args), err
		}
		if args.Wipe {
			all = o.wiping(r, timeout, all)
		}
		return slices.Concat(write(r, args), all, []operation.Step{o.prove(args)}), err
	}
	d.Plan = func(ctx context.Context, r operation.Request) (p operation.Plan, err error) {
		args, err := operation.Decode[PowerArguments](r)
		if err == nil {
			err = may()
		}
		if err == nil && args.Image == "" {
			_, err = o.Systems.Medium(ctx, args.Older)
		}
		if err == nil && args.Wipe && o.controlPlane() {
			err = o.Etcd.MayLeave(ctx, 0)
		}
		if err != nil {
			return p, err
		}
		if args.Stage {
			p = operation.Plan{Steps: write(r, args), Unlocked: "the node isn't restarted"}
			return p, o.sayWhere(p.Steps)
		}
		if p, err = plan(ctx, r); err == nil {
			p.Steps, err = around(r, p.Steps)
		}
		if err == nil {
			err = o.sayWhere(p.Steps)
		}
		return p, err
	}
	d.Steps = func(r operation.Request) ([]operation.Step, error) {
		all, err := steps(r)
		if err == nil {
			all, err = around(r, all)
		}
		if r.Resuming && o.Systems != nil && o.Systems.Trial() {
			ended(all) // by whatever: the new system has one boot
		}
		return all, err
	}
	return d
}

// wiping adds to the steps of a restart that the node leaves the cluster before, and that EPHEMERAL is wiped. The node joins the cluster
// again after the restart.
func (o Options) wiping(r operation.Request, timeout time.Duration, all []operation.Step) []operation.Step {
	control := o.controlPlane()
	leave := slices.DeleteFunc(o.leaveCluster(r, timeout), func(s operation.Step) bool {
		return s.ID == "cordon" || s.ID == "drain" || s.ID == "etcd" && !control
	})
	wipe := o.wipe(r, ResetArguments{}, []string{boot.LabelEphemeral})
	run := wipe.Run
	wipe.Run = func(ctx context.Context, p *operation.Progress) error {
		if err := run(ctx, p); err != nil {
			return err
		}
		return marked.Put(p, true)
	}
	leave = append(leave, wipe)
	all = slices.DeleteFunc(all, func(s operation.Step) bool { return s.ID == "quorum" })
	return slices.Insert(all, slices.IndexFunc(all, func(s operation.Step) bool { return s.EndsNode }), leave...)
}

func (o Options) mayUpgrade() error {
	all, err := o.installed()
	if err != nil {
		return err
	}
	if running, err := all.Of(o.Systems.Running()); err != nil {
		return err
	} else if running.State == boot.SlotTrying {
		return errors.New("the running system isn't known to be healthy yet: wait until it is (gbctl get slots, gbctl doctor)")
	}
	return nil
}

// installed are the slots of a machine that runs from its disk.
func (o Options) installed() (boot.Slots, error) {
	switch {
	case o.Systems == nil:
		return boot.Slots{}, errNoSlots
	case o.Systems.Running() == "":
		return boot.Slots{}, errors.New("this machine doesn't run from its disk: it has the system of its medium, or of the network")
	}
	return o.Systems.Get()
}

func (o Options) rollback() operation.Definition {
	d := o.changed(Rollback)
	plan, steps := d.Plan, d.Steps
	with := func(r operation.Request, all []operation.Step) []operation.Step {
		at := max(slices.IndexFunc(all, func(s operation.Step) bool { return s.EndsNode }), 0)
		all = append(slices.Insert(all, at, o.choose(r)), o.prove(PowerArguments{}))
		first := all[0].Run
		all[0].Run = func(ctx context.Context, p *operation.Progress) error {
			if err := o.remember(r, p); err != nil {
				return err
			}
			return first(ctx, p)
		}
		return all
	}
	d.Plan = func(ctx context.Context, r operation.Request) (operation.Plan, error) {
		if err := o.mayRollback(); err != nil {
			return operation.Plan{}, err
		}
		p, err := plan(ctx, r)
		p.Steps = with(r, p.Steps)
		return p, err
	}
	d.Steps = func(r operation.Request) ([]operation.Step, error) {
		all, err := steps(r)
		all = with(r, all)
		if r.Resuming && o.Systems != nil && o.Systems.Trial() {
			ended(all)
		}
		return all, err
	}
	return d
}

// choose makes the other slot boot next.
func (o Options) choose(r operation.Request) operation.Step {
	return operation.Step{
		ID: "choose", What: "make the other slot boot next", Deadline: chooseTimeout,
		Run: func(ctx context.Context, p *operation.Progress) error {
			to, err := target.Get(p)
			if err != nil {
				to = new(boot.Slots).Target(o.Systems.Running())
				err = target.Put(p, to)
			}
			if err != nil || to == o.Systems.Running() { // it has restarted meanwhile
				return err
			}
			return o.Systems.Rollback(ctx, "rolled back by "+r.By, o.excused(p))
		},
		Undo: target.Then(func(ctx context.Context, _ *operation.Progress, to string) error {
			if to == o.Systems.Running() {
				return nil
			}
			return o.Systems.Stay(ctx)
		}),
	}
}

func (o Options) mayRollback() error {
	all, err := o.installed()
	if err != nil {
		return err
	}
	return all.Rollback(o.Systems.Running(), "", nil, time.Time{}) // of a copy
}

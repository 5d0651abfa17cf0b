package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/slots"
)

// Names of the operations that change the system in a slot. Each ends with a boot of that slot:
//
//	install, upgrade   pull or find ─▶ verify ─▶ images (upgrade) ─▶ write ─▶ cordon ─▶ drain ─▶ quorum ─▶ end ══▶ uncordon ─▶ back ─▶ prove
//	rollback                                      cordon ─▶ drain ─▶ quorum ─▶ choose ─▶ end ══▶ uncordon ─▶ back ─▶ prove
//
// If the system of that slot doesn't become healthy, the machine boots the other one, which fails the operation with
// the reason.
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
	// proveTimeout is how long a new system may take to become healthy, and wipedTimeout is for one that pulls all
	// images first.
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

// target is the slot that an operation writes; source is what it writes there. marked is whether EPHEMERAL is wiped
// before it runs. sick are the services that weren't healthy when the operation began: after a restart, others aren't
// up yet.
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

// writes reports whether the operation writes a system, and switches whether it brings another one.
func (j job) writes() bool   { return j.name == Install || j.name == Upgrade }
func (j job) switches() bool { return j.writes() || j.name == Rollback }

// systemSteps are those of an operation that brings another system.
func (j job) systemSteps() []operation.Step {
	before := slices.Concat(j.writing(), j.emptying(), j.leaving(), []operation.Step{
		{ID: "choose", What: "make the other slot boot next", Deadline: chooseTimeout, Omit: j.name != Rollback,
			Run: j.choose, Undo: target.Then(j.unchoose)},
	}, j.ending(holdReboot))
	if j.Resuming && j.Systems != nil && j.Systems.Trial() { // a new system has one boot
		before = ended(before)
	}
	return slices.Concat(before, j.returning(), []operation.Step{
		{ID: "prove", What: "see that the system is healthy", Deadline: ProveTimeout(boot.Slot{Wiped: j.Wipe}) + proveGrace,
			Omit: !j.ends(), Run: j.prove},
	})
}

// writing are the steps up to a complete system in a slot.
func (j job) writing() []operation.Step {
	return []operation.Step{
		{ID: "find", What: "find the system on the medium", Deadline: verifyTimeout, Omit: !j.writes() || j.Image != "", Run: j.get},
		{ID: "pull", What: "pull the image " + j.Image, Deadline: pullTimeout, Omit: !j.writes() || j.Image == "",
			Run: j.withContainerd(j.get)},
		{ID: "verify", What: "read the system, and compare its checksum", Deadline: verifyTimeout, Omit: !j.writes(),
			Run: j.withContainerd(source.Then(j.verify))},
		{ID: "images", What: "pull the images that the system runs pods with", Deadline: pullTimeout,
			// a machine that isn't installed may have no containerd
			Omit: j.name != Upgrade, Run: source.Then(j.images)},
		{ID: "write", What: "write the system to " + cmp.Or(j.where, "the slot that doesn't run"), Deadline: writeTimeout,
			Omit: !j.writes(), Run: j.withContainerd(source.Then(j.write)), Undo: target.Then(j.unwrite)},
	}
}

// lookHere refuses what can't be written, and looks where it would be, and what isn't healthy before.
func (j *job) lookHere(ctx context.Context, p *operation.Plan) (err error) {
	if j.Unhealthy != nil {
		err = sick.In(p, j.Unhealthy())
	}
	if err != nil || !j.writes() {
		return err
	}
	if j.Image == "" {
		_, err = j.Systems.Medium(ctx, j.AllowOlder)
	}
	if err == nil && j.Wipe && j.controlPlane() {
		err = j.Etcd.MayLeave(ctx, 0)
	}
	if err == nil {
		j.where, err = j.Systems.Where()
	}
	return err
}

// get finds a system: of an image, or of the medium in the machine.
func (j job) get(ctx context.Context, p *operation.Progress) (err error) {
	var src slots.Source
	if j.Image == "" {
		src, err = j.Systems.Medium(ctx, j.AllowOlder)
	} else {
		src, err = j.Systems.Pull(ctx, j.Image, j.AllowOlder, percent(p, "pulled"))
	}
	if err != nil {
		return err
	}
	return source.Put(p, src)
}

func (j job) verify(ctx context.Context, p *operation.Progress, src slots.Source) error {
	p.Report("%s", src)
	if err := j.Systems.Verify(ctx, src, percent(p, "read")); err != nil {
		return err
	}
	all, err := j.Systems.Get()
	if err != nil {
		return err
	}
	return target.Put(p, all.Target(j.Systems.Running()))
}

// write is the step after which a slot has a complete system.
func (j job) write(ctx context.Context, p *operation.Progress, src slots.Source) error {
	slot, err := target.Get(p)
	if err != nil || slot == j.Systems.Running() { // it was written, and the machine has restarted
		return err
	}
	system := boot.Slot{Wiped: j.Wipe}
	if j.Systems.Running() != "" {
		system.Excused, system.Kubernetes = j.excused(p), true
	}
	if cfg, err := configuration.Config(j.Store); err == nil {
		system.Args = cfg.Machine.Install.ExtraKernelArgs
	}
	p.Report("to slot %s", slot)
	return j.Systems.Write(ctx, slot, src, system, percent(p, "written"))
}

func (j job) unwrite(ctx context.Context, _ *operation.Progress, slot string) error {
	if slot == j.Systems.Running() {
		return fmt.Errorf("the machine has restarted, with the new system in slot %s, which stays if it is healthy: `gbctl rollback` goes back to the former one", slot)
	}
	return j.Systems.Empty(ctx, slot)
}

// withContainerd waits for containerd before it runs what needs it for an image.
func (j job) withContainerd(do run) run {
	return func(ctx context.Context, p *operation.Progress) error {
		if j.Image != "" {
			if _, err := j.containerd(ctx, p); err != nil {
				return err
			}
		}
		return do(ctx, p)
	}
}

// excused are the services that weren't healthy then, and still aren't.
func (o Options) excused(p *operation.Progress) []string {
	before, err := sick.Get(p)
	if err != nil || o.Unhealthy == nil {
		return nil
	}
	still := o.Unhealthy()
	return slices.DeleteFunc(before, func(name string) bool { return !slices.Contains(still, name) })
}

// containerd waits for containerd, which starts again after a restart of the node. One that wasn't healthy before isn't
// waited for.
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

// images pulls what the new system runs pods with, before anything is written. Otherwise no pod would start with that
// system, in a place where it can't pull.
func (o Options) images(ctx context.Context, p *operation.Progress, src slots.Source) error {
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

// prove waits until it is known whether the system in the target is healthy. It runs after the boot, in that system or
// in the other one.
func (j job) prove(ctx context.Context, p *operation.Progress) error {
	name, err := target.Get(p)
	if err != nil {
		return fmt.Errorf("the machine restarted before this operation chose a system: start it again (%w)", err)
	}
	for range sleep.Every(ctx, provePoll) {
		begun := j.Systems.Begun() // before it has, the slots don't say what became of the new system
		all, err := j.Systems.Get()
		if err != nil {
			return err
		}
		if !begun {
			continue
		}
		if good, err := all.Outcome(name, j.Systems.Running()); err != nil {
			return err
		} else if good {
			if _, err := marked.Get(p); j.Wipe && err != nil {
				return errors.New("the new system is healthy, but the machine restarted before the data was marked for wiping: `gbctl -n ADDRESS reset --system-labels-to-wipe EPHEMERAL --reboot` wipes it")
			}
			return nil
		}
	}
	return ctx.Err()
}

func (o Options) mayUpgrade() error {
	all, err := o.installed()
	if err != nil {
		return err
	}
	if all.Unproven(o.Systems.Running()) {
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

// choose makes the other slot boot next.
func (j job) choose(ctx context.Context, p *operation.Progress) error {
	to, err := target.Get(p)
	if err != nil {
		to = new(boot.Slots).Target(j.Systems.Running())
		err = target.Put(p, to)
	}
	if err != nil || to == j.Systems.Running() { // it has restarted meanwhile
		return err
	}
	return j.Systems.Rollback(ctx, "rolled back by "+j.By, j.excused(p))
}

func (j job) unchoose(ctx context.Context, _ *operation.Progress, to string) error {
	if to == j.Systems.Running() {
		return nil
	}
	return j.Systems.Stay(ctx)
}

func (o Options) mayRollback() error {
	all, err := o.installed()
	if err != nil {
		return err
	}
	return all.Rollback(o.Systems.Running(), "", nil, time.Time{}) // of a copy
}

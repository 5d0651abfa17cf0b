// Package slots owns the two systems on a machine's disk: what META says about them, and what the boot loaders start.
//
//	medium ─▶ Write: the new system's own program (package install) ─▶ file in the EFI system partition ─▶ Written: trying ═▶ the next boot ─▶ healthy: good
//	                                                                                        ╰▶ else: bad, and the other one boots
//
// META has the truth (boot.Slots). The files for the boot loaders (boot/esp) follow from it, and are made again
// whenever they may differ.
package slots

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
)

// ID owns the resources, and is the log.
const ID = "slots"

// Status is a slot as users see it.
type Status struct {
	State   boot.SlotState `yaml:"state" column:"STATE"`
	Version string         `yaml:"version,omitempty" column:"RELEASE"`
	Running yes            `yaml:"running" column:"RUNNING"`
	Next    yes            `yaml:"next" column:"NEXT"` // it boots next
	Since   time.Time      `yaml:"since,omitempty" column:"SINCE"`
	Reason  string         `yaml:"reason,omitempty" column:"REASON"`
}

// yes is a bool in a table.
type yes bool

func (y yes) String() string { return map[yes]string{true: "yes", false: "no"}[y] }

// Statuses are both slots of a machine.
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "Slots.runtime.garboard.dev",
	Kind:      "Slot",
	Aliases:   []string{"slot"},
	Namespace: "runtime",
})

// Disks is the system disk.
type Disks interface {
	SystemDisk() (disks.SystemDisk, error)
	Known() bool
	Measured() disks.Measured
	SealFor(ctx context.Context, policyKey string) error
	UseEFI(ctx context.Context, use func(dir string) error) error
	Volume(ctx context.Context, label string, use func(fs.FS) error) error
	Media(ctx context.Context, label string, use func(fs.FS) error) error
}

// Images are installer images.
type Images interface {
	Fetch(ctx context.Context, ref string, report func(done, of int64)) error
	Files(ctx context.Context, ref string, use func(fs.FS) error) error
	Forget(ctx context.Context) error
}

// Options are what the slots stand on.
type Options struct {
	Cmdline boot.Cmdline
	Store   *resource.Store
	Disks   Disks
	Images  Images
	// Panicked is why the kernel of an earlier boot died, if it has stored that since the last boot that had its disk.
	Panicked func() string
	// Processes starts the program of a new system.
	Processes *process.Table
	Log       *slog.Logger

	// Tests have their own.
	loaders, firmware, keys, lockdown string
	run                               func(ctx context.Context, program, in io.Reader, out io.Writer, slot *os.File) error
}

// Slots are those of one machine.
type Slots struct {
	o Options
	// mu is held during all changes of META's slots and of the EFI system partition.
	mu      sync.Mutex
	counted bool // this boot is in META's slots
	begun   atomic.Bool
}

// New returns the slots; nothing is read yet.
func New(o Options) *Slots {
	o.loaders, o.firmware = cmp.Or(o.loaders, esp.LoaderDir), cmp.Or(o.firmware, esp.FirmwareDir)
	o.keys, o.lockdown = cmp.Or(o.keys, signed.KeysFile), cmp.Or(o.lockdown, lockdownFile)
	if o.run == nil {
		o.run = o.jailed
	}
	return &Slots{o: o}
}

// Running is the slot that this boot is from; "": it is from a medium, or over the network.
func (s *Slots) Running() string {
	name, _ := s.o.Cmdline.Get(boot.ParamSlot)
	return name
}

// Trial reports whether this boot is the one that a system on trial has. It doesn't need the disk.
func (s *Slots) Trial() bool {
	_, given := s.o.Cmdline.Get(boot.ParamTrial)
	return given
}

// Fallback reports whether this boot is one that a system on trial has, and a good one runs after it.
func (s *Slots) Fallback() bool { return s.o.Cmdline.Fallback() }

// Where is the slot that a new system is written to, with its disk and the partitions of that.
func (s *Slots) Where() (string, error) {
	all, err := s.Get()
	if err != nil {
		return "", err
	}
	disk, err := s.o.Disks.SystemDisk()
	return fmt.Sprintf("slot %s of %s (%s)", all.Target(s.Running()), disk.Path, disk.Layout), err
}

// Get is what META says.
func (s *Slots) Get() (slots boot.Slots, err error) {
	err = s.meta(func(c meta.Change) error {
		slots, err = boot.ReadSlots(c)
		return err
	})
	return slots, err
}

// meta calls use with the values of META, and writes what it has changed.
func (s *Slots) meta(use func(c meta.Change) error) error {
	system, err := s.o.Disks.SystemDisk()
	if err != nil {
		return err
	}
	return meta.Use(system.Meta.Path, use)
}

// change writes a change of the slots to META, and makes the boot loaders follow: if those can't, the same change does
// it again. The caller holds s.mu.
func (s *Slots) change(ctx context.Context, change func(slots *boot.Slots) error) error {
	slots, err := s.record(change)
	if err != nil {
		return err
	}
	return s.follow(ctx, slots)
}

// record writes a change of the slots to META.
func (s *Slots) record(change func(slots *boot.Slots) error) (slots boot.Slots, err error) {
	err = s.meta(func(c meta.Change) (err error) {
		slots, err = boot.ChangeSlots(c, change)
		return err
	})
	if err == nil {
		s.publish(slots)
	}
	return slots, err
}

// follow makes the boot loaders start what the slots say, and the firmware start this disk. The loaders themselves are
// written by an installation, and by a system that has become good: what starts a good system isn't replaced by one on
// trial. They come last: if the power goes before, the firmware starts the medium again.
func (s *Slots) follow(ctx context.Context, slots boot.Slots) error {
	if err := s.o.Disks.UseEFI(ctx, func(dir string) error { return esp.Partition(dir).Start(slots) }); err != nil {
		return fmt.Errorf("boot entries: %w", err)
	}
	first := slots.Alone()
	if first && slots.Next() == "" {
		return nil
	}
	if first {
		if err := s.writeLoaders(ctx); err != nil {
			return fmt.Errorf("boot loader: %w", err)
		}
	}
	return s.register(first)
}

// register makes the firmware start this disk. Firmware finds the loader without an entry, too: an error is only
// logged.
func (s *Slots) register(first bool) error {
	system, err := s.o.Disks.SystemDisk()
	if err != nil {
		return err
	}
	place := esp.Place{Number: uint32(system.EFI.Number), Start: uint64(system.EFI.Start / system.Sector), Sectors: uint64(system.EFI.Size / system.Sector), GUID: system.EFI.GUID}
	if err := esp.Register(s.o.firmware, place, first); err != nil {
		s.o.Log.Warn("the firmware's boot entry", "err", err)
	}
	return nil
}

func (s *Slots) writeLoaders(ctx context.Context) error {
	content := map[string][]byte{}
	for _, name := range []string{esp.GRUBRecord, esp.GRUBProgram, esp.SystemdBoot} {
		data, err := os.ReadFile(filepath.Join(s.o.loaders, name))
		if err != nil {
			return err
		}
		content[name] = data
	}
	if err := s.starts(bytes.NewReader(content[esp.SystemdBoot]), int64(len(content[esp.SystemdBoot]))); err != nil {
		return fmt.Errorf("%s of this system: %w", esp.SystemdBoot, err)
	}
	if err := s.o.Disks.UseEFI(ctx, func(dir string) error { return esp.Partition(dir).Loaders(content[esp.SystemdBoot]) }); err != nil {
		return err
	}
	system, err := s.o.Disks.SystemDisk()
	if err != nil {
		return err
	}
	disk, err := system.Open()
	if err != nil {
		return err
	}
	defer disk.Close()
	return esp.BootRecord(disk, content[esp.GRUBRecord], content[esp.GRUBProgram], system.BIOS.Start, system.BIOS.Size)
}

func (s *Slots) publish(slots boot.Slots) {
	for _, name := range boot.SlotNames {
		slot := slots.Of(name)
		status := Status{State: slot.State, Version: slot.Version, Running: name == s.Running(), Next: name == slots.Next(), Since: slot.Since, Reason: slot.Reason}
		if err := Statuses.Put(s.o.Store.As(ID), name, status); err != nil {
			s.o.Log.Error("publish slot", "slot", name, "err", err)
		}
	}
}

// Begun reports whether this boot has recorded what it says about the slots.
func (s *Slots) Begun() bool { return s.begun.Load() }

// Begin is for a boot that has its disk: it records what this boot says about the slots.
func (s *Slots) Begin(ctx context.Context) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.begun.Store(err == nil) }()
	slots, err := s.Get()
	if err != nil {
		return err
	}
	running := s.Running()
	if running == "" {
		s.publish(slots)
		return nil
	}
	started, err := s.started(ctx, slots, running)
	if err != nil {
		return err
	}
	begun := func(slots *boot.Slots) error {
		now := time.Now()
		if err := slots.Found(running, boot.Slot{Version: boot.Version, Args: s.args()}, s.Fallback(), now); err != nil {
			return err
		}
		for _, name := range boot.SlotNames {
			if slot := slots.Of(name); name != running && slot.State == boot.SlotTrying && (name == started || slot.Tries == 0) {
				s.o.Log.Error("the system on trial didn't come up, and this one runs again", "slot", name, "version", slot.Version)
				if err := slots.Fail(name, s.lastWords(name), now); err != nil {
					return err
				}
			}
		}
		if s.counted { // this is another try of the service
			return nil
		}
		if err := slots.Booted(running, now); err != nil {
			s.o.Log.Warn(err.Error()) // there is no other system
		}
		return nil
	}
	next := slots
	if err := begun(&next); err != nil {
		return err
	}
	// What boots next runs: the boot loaders have followed the last change, and this boot needn't wait for the EFI
	// system partition.
	if reflect.DeepEqual(next, slots) && slots.Next() == running && !s.counted {
		s.publish(slots)
		return s.register(false) // a firmware that was reset has lost its entries
	}
	if slots, err = s.record(begun); err != nil {
		return err
	}
	s.counted = true
	return s.follow(ctx, slots)
}

// lastWords is why the system in a slot has failed that was started, as far as this machine knows how its boot ended.
func (s *Slots) lastWords(name string) string {
	why := "it was started, and didn't become healthy before the machine restarted"
	if panicked := s.o.Panicked(); panicked != "" {
		return why + ": the kernel panicked: " + panicked
	}
	// The boot that failed isn't in the history if it ended before it had its disk.
	if boots := configuration.Boots.List(s.o.Store); len(boots) > 1 && boots[len(boots)-2].Spec.Slot == name {
		why += ": " + boots[len(boots)-2].Spec.Exit
	}
	return why
}

// started is the slot that is trying, if a boot loader has started it and another one runs now; "": there is none.
func (s *Slots) started(ctx context.Context, slots boot.Slots, running string) (name string, err error) {
	for _, other := range boot.SlotNames {
		if slot := slots.Of(other); other == running || slot.State != boot.SlotTrying {
			continue
		}
		err := s.o.Disks.UseEFI(ctx, func(dir string) error {
			was, err := esp.Partition(dir).Started(other)
			if was {
				name = other
			}
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return name, nil
}

// Prove makes the running system good.
func (s *Slots) Prove(ctx context.Context, reason string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.change(ctx, func(slots *boot.Slots) error { return slots.Prove(s.Running(), reason, time.Now()) }); err != nil {
		return err
	}
	if err := s.writeLoaders(ctx); err != nil {
		s.o.Log.Error("the boot loaders stay those of the former system", "err", err)
	}
	return nil
}

// Fail makes the running system bad. The error is that there is no other.
func (s *Slots) Fail(ctx context.Context, reason string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.change(ctx, func(slots *boot.Slots) error { return slots.Fail(s.Running(), reason, time.Now()) })
}

// Empty takes a system that hasn't booted yet out of its slot.
func (s *Slots) Empty(ctx context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.empty(ctx, name)
}

// empty is Empty, whose caller holds s.mu.
func (s *Slots) empty(ctx context.Context, name string) error {
	if name == s.Running() {
		return fmt.Errorf("empty slot %s: it has the system that runs", name)
	}
	return s.change(ctx, func(slots *boot.Slots) error { return slots.Write(name, time.Now()) })
}

// Rollback makes the other system boot next. excused are the services that needn't be healthy with it.
func (s *Slots) Rollback(ctx context.Context, reason string, excused []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.Get()
	if err != nil {
		return err
	}
	to := all.Target(s.Running())
	if err := s.o.Disks.UseEFI(ctx, func(dir string) error { return esp.Partition(dir).Check(to) }); err != nil {
		return fmt.Errorf("roll back to slot %s: %w", to, err)
	}
	return s.change(ctx, func(slots *boot.Slots) error { return slots.Rollback(s.Running(), reason, excused, time.Now()) })
}

// Stay takes a rollback back that hasn't restarted the machine.
func (s *Slots) Stay(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.change(ctx, func(slots *boot.Slots) error { slots.Stay(s.Running(), time.Now()); return nil })
}

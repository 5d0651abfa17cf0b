// Package disks prepares the node's disk.
//
// It is the service `disks`. On a machine it finds the system disk, partitions
// an empty one, makes the file systems, mounts STATE and EPHEMERAL, and keeps
// the configuration on STATE. It doesn't change a disk with other content
// unless the configuration allows that, and never the medium that the machine
// booted from. The package volume makes what this one decides, and the package
// volumes uses the disks of machine.disks.
//
// In a container the provisioner has bind-mounted both directories already.
package disks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/api/kms"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/media"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/volume"
	"golang.org/x/sys/unix"
)

const (
	// ID of the service.
	ID = "disks"

	// ownPatience is how long the disk or the TPM may be missing that this boot is from, before the node does without:
	// controllers start many disks one after another.
	ownPatience = time.Minute
	// settleAgain: each key takes a second of a processor.
	settleAgain = 5 * time.Minute
	// stopBudget: a file system with many dirty pages takes long to unmount.
	stopBudget = 20 * time.Second
)

// Options are the inputs of the service.
type Options struct {
	Mode boot.Mode
	// Installed: this boot is from a disk, which must be there.
	Installed bool
	Store     *resource.Store
	Processes *process.Table
	Logs      *logs.Logs
	// StateReady is called after STATE is mounted; the configuration may be
	// another one afterwards.
	StateReady func() error
	// Sound is an error if the system that this machine is to be installed with can't be used. It is asked before a
	// disk with data is erased.
	Sound func(context.Context) error
	// Network starts the network before there is a configuration, with settings if they are known.
	Network func(ctx context.Context, settings *config.Network) error
	// TPM seals keys of the system's disk; nil: that of a machine without one.
	TPM *tpm.TPM
	// Plugins are the CNI plugins of the image. A pod network may install its own beside them.
	Plugins string

	dirs     volume.Dirs // tests have their own, and also of these
	idFile   string
	efiDir   string
	patience time.Duration // warnAfter; shorter in tests
	statfs   statfs        // tests have disks that fill up
	uuidFile string        // luks.ProductUUID; tests have machines of their own

	derivation     []string      // luks.Derivation; tests have a faster one
	serverPatience time.Duration // kms.Patience; tests have less
}

// Disks is the service. MountState works before the service runs.
type Disks struct {
	Keeper *volume.Keeper // has the volumes of all disks
	*media.Finder

	o       Options
	log     *slog.Logger
	volumes []volume.Volume // of the system disk, in the order of mounting
	layers  []*luks.Layer   // the encryption of each

	mu     sync.Mutex                // held during all changes of the system disk
	at     string                    // the disk whose STATE is made or opened
	asked  int                       // how often the network was started before there was a configuration
	opened atomic.Bool               // the volumes are: a server is asked once
	again  time.Time                 // when the keys are settled again, as a server didn't answer; zero: not again
	system atomic.Pointer[disk.Disk] // the disk that STATE is on, once it is mounted
	known  atomic.Bool               // it was there before
	tpm    byTPM                     // guarded by mu

	measured atomic.Pointer[Measured] // nil: not yet

	settled atomic.Pointer[map[string]error] // what is wrong with the encryption of volumes; nil: not known yet
	reset   atomic.Pointer[reset]            // what Erase wipes; nil: nothing

	// key is a recovery key that was given to this boot, until the volumes have the machine's own keys; guarded by mu.
	key    string
	locked *disk.Disk // its STATE opens with no key; guarded by mu
	making []luks.Key // with which STATE is encrypted in place; nil: it isn't now; guarded by mu
	// Unlocked gets something when STATE can be opened with it, or is to be wiped.
	Unlocked chan struct{}
}

// New makes the service and doesn't start it.
func New(o Options) *Disks {
	option.Default(&o.dirs, volume.Dirs{State: boot.StateDir, Var: boot.EphemeralDir, Etc: "/etc"})
	option.Default(&o.idFile, machineIDFile)
	option.Default(&o.efiDir, boot.EFIDir)
	option.Default(&o.patience, warnAfter)
	option.Default(&o.statfs, unix.Statfs)
	option.Default(&o.uuidFile, luks.ProductUUID)
	option.Default(&o.derivation, luks.Derivation)
	option.Default(&o.serverPatience, kms.Patience)
	option.Default(&o.Sound, func(context.Context) error { return nil })
	option.Default(&o.TPM, tpm.New(""))
	d := &Disks{o: o, log: o.Logs.Logger(ID), Unlocked: make(chan struct{}, 1)}
	all := disk.NewInventory()
	d.Keeper = &volume.Keeper{Disks: all, Dirs: o.dirs, Processes: o.Processes, Log: d.log, Before: func(string) error { return nil }}
	d.Finder = media.New(media.Finder{Disks: all, System: d.System})
	d.tpm = byTPM{TPM: o.TPM, known: map[string][]byte{}, failed: map[string]error{}, made: map[string]bool{}}
	dirs := map[string]string{boot.LabelState: o.dirs.State, boot.LabelEphemeral: o.dirs.Var}
	for _, v := range boot.Volumes {
		if v.Dir = dirs[v.Label]; v.Dir != "" {
			d.layers = append(d.layers, d.encryption(v.Label))
			d.volumes = append(d.volumes, d.Keeper.Volume(v, d.layers[len(d.layers)-1]))
		}
	}
	return d
}

// Service is disks in the graph: up after STATE and EPHEMERAL are mounted.
func (d *Disks) Service() dag.Service {
	return dag.Service{ID: ID, Run: d.run, Restart: dag.RestartOnError, StopBudget: stopBudget}
}

func (d *Disks) run(ctx context.Context, h *dag.Handle) error {
	cfg, err := configuration.Config(d.o.Store)
	if err != nil {
		return err
	}
	message := "directories of the host"
	if d.o.Mode == boot.Machine {
		if message, err = d.provision(ctx, h, cfg.Machine.Install); err != nil {
			return err
		}
		defer d.close()
	}
	if err := errors.Join(d.o.StateReady(), makeDirectories(d.o.dirs.Var), nameMachine(d.o.dirs.State, d.o.idFile)); err != nil {
		return err
	}
	if err := d.openPlugins(); err != nil {
		d.log.Warn(err.Error() + "; only pod networks that bring plugins of their own miss it")
	}
	space := d.space()
	space.check()
	h.Started(message)
	d.settle(ctx)
	for configs := d.o.Store.Watch(ctx, configuration.Configs.Type()); sleep.Until(ctx, configs, spaceEvery); {
		space.check()
		if !d.again.IsZero() && time.Now().After(d.again) {
			d.settle(ctx)
		}
		if d.System() == nil {
			continue // a container
		}
		d.mu.Lock()
		d.closeTPM()
		d.mu.Unlock()
		if err := d.keepNetwork(); err != nil {
			d.log.Warn("the next boot may not reach the key server of STATE: " + err.Error())
		}
	}
	return nil
}

// close ends the use of all disks.
func (d *Disks) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.Keeper.Close()
	d.system.Store(nil)
	d.opened.Store(false)
}

// System is the disk that STATE is on, once it is mounted; nil before.
func (d *Disks) System() *disk.Disk { return d.system.Load() }

// Known reports whether the node had a STATE before this boot, however the machine was started.
func (d *Disks) Known() bool { return d.known.Load() }

// List has all disks with their content, and changes nothing. In a container there are none:
// the node doesn't use those of the host.
func (d *Disks) List() ([]disk.Disk, error) {
	if d.o.Mode == boot.Container {
		return nil, nil
	}
	all, err := d.Keeper.Disks.All()
	for i := range all {
		all[i].System = d.isSystem(all[i])
	}
	return all, err
}

func (d *Disks) isSystem(dev disk.Disk) bool {
	system := d.System()
	return system != nil && system.Path == dev.Path
}

// MountState mounts STATE if a disk has one already, before there is a
// configuration that names the disk.
func (d *Disks) MountState(ctx context.Context) (configuration.State, error) {
	if d.o.Mode == boot.Container {
		return configuration.StateMounted, d.wipeDirectories() // they are bind mounts of the host
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.System() != nil {
		return configuration.StateMounted, nil
	}
	d.locked = nil
	dev, state, err := d.findSystem(ctx)
	if err == nil && d.lateTPM() {
		return configuration.StateLate, errors.New("the TPM of this machine isn't there yet")
	}
	if state != configuration.StateLate && state != configuration.StateWiping {
		d.openTPM(ctx, dev)
	}
	if err != nil || dev.Verdict != disk.Ours {
		return state, err
	}
	d.at = dev.Path
	if err := d.encryptState(ctx, dev); err != nil {
		return configuration.StateBroken, err
	}
	v := d.volumes[0] // STATE
	// An image was written to this disk, and it hasn't been booted before.
	blank, err := d.Keeper.Missing(ctx, dev, v)
	if err == nil && blank {
		return configuration.StateAbsent, nil
	}
	if err == nil {
		err = d.Keeper.Open(ctx, dev, v)
	}
	if errors.As(err, new(luks.Locked)) {
		d.locked = &dev
		return configuration.StateLocked, err
	} else if err != nil {
		return configuration.StateBroken, err
	}
	d.system.Store(&dev)
	d.known.Store(true)
	d.log.Info("STATE is on " + dev.Path)
	return configuration.StateMounted, nil
}

// mayCome reports whether what the kernel finds may not be there yet.
func (d *Disks) mayCome() bool { return time.Since(d.Keeper.Disks.Began) < ownPatience }

// findSystem is the disk with a complete layout of ours; one without a verdict: there is none. Of several, that one
// counts which the boot loader was on. Otherwise they are an error: a machine that chooses by itself may join the
// wrong cluster, and a pod may have made one on a disk of its own. A disk of a newer release is an error, too. The
// disk of this boot is awaited.
func (d *Disks) findSystem(ctx context.Context) (none disk.Disk, state configuration.State, err error) {
	all, err := d.Keeper.Disks.All()
	if err != nil && d.mayCome() {
		return none, configuration.StateLate, err
	}
	if err != nil {
		return none, configuration.StateAbsent, err
	}
	from := ""
	if d.o.Installed {
		from = esp.StartedFrom(d.Firmware)
	}
	var out []disk.Disk
	seen := false // the disk of this boot, perhaps without STATE
	for _, own := range []bool{true, false} {
		for _, f := range all {
			if f.Err != nil {
				d.log.Warn(f.Err.Error() + "; going on without this disk")
				continue
			}
			if f.Verdict != disk.Newer && f.Verdict != disk.Ours || own && from != "" && !f.Has(from) {
				continue
			}
			seen = seen || own
			if f.Verdict == disk.Newer || !f.Pending.Interrupted(boot.LabelState) {
				out = append(out, f)
			}
		}
		if seen || from == "" {
			break
		}
	}
	switch {
	case len(out) > 1:
		return none, configuration.StateBroken, fmt.Errorf("%s and %s both hold a Garboard system: unplug the one that this machine isn't to boot from", out[0].Path, out[1].Path)
	case len(out) == 1 && out[0].Verdict == disk.Newer:
		return none, configuration.StateAbsent, d.refuseNewer(out[0])
	case !seen && d.o.Installed && d.mayCome():
		return none, configuration.StateLate, errors.New("the disk that this system was started from isn't there yet")
	case len(out) == 0:
		return none, configuration.StateAbsent, nil
	}
	f, err := d.wipeMarked(ctx, out[0])
	if _, waits := errors.AsType[awaited](err); waits {
		return none, configuration.StateWiping, err
	}
	if err != nil || f.Pending.Interrupted(boot.LabelState) {
		return none, configuration.StateAbsent, err
	}
	return f, configuration.StateAbsent, nil
}

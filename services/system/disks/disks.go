// Package disks prepares the node's disk.
//
// It is the service `disks`. On a machine it finds the system disk, partitions
// an empty one, makes the file systems, mounts STATE and EPHEMERAL, and keeps
// the configuration on STATE. It doesn't change a disk with other content
// unless the configuration allows that, and never the medium that the machine
// booted from. A power cut can interrupt every change of a disk, and the next
// boot finishes it (see journal.go).
//
// In a container the provisioner has bind-mounted both directories already.
package disks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
	"golang.org/x/sys/unix"
)

const (
	// ID of the service.
	ID = "disks"

	// pollEvery is how often it looks for a missing disk.
	pollEvery = 500 * time.Millisecond
	// warnAfter is how long a disk may be missing before that is logged:
	// controllers of real machines take that long to detect theirs.
	warnAfter = 10 * time.Second
	// ownPatience is how long the disk may be missing that this boot is from, before the node does without: controllers start many disks one after
	// another.
	ownPatience = time.Minute
	// lateDisks is how long no disk is begun that has nothing of this node: the kernel looks for disks while the node starts already, and
	// the one with the data may be slower than an empty one that also fits.
	lateDisks = 10 * time.Second
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
	// Sound is an error if the system that this machine is to be installed with can't be used. It is asked before a disk with data is erased.
	Sound func(context.Context) error
	// Plugins are the CNI plugins of the image. A pod network may install its own beside them.
	Plugins string

	isDisk   func(name string) bool   // entries of /sys/block that are disks; tests use loop devices
	serial   func(name string) string // of a disk; loop devices have none
	stateDir string                   // tests have their own
	varDir   string                   // tests have their own
	etcDir   string                   // tests have their own
	idFile   string                   // tests have their own
	firmware string                   // tests have their own
	before   func(step string) error  // called before a step; tests cut the power there
	patience time.Duration            // warnAfter; shorter in tests

	// mount calls use with the directory of a volume; the kernel of tests has no FAT.
	mount  func(device, kind string, use func(dir string) error) error
	statfs func(dir string, to *unix.Statfs_t) error // tests have disks that fill up
}

// Disks is the service. MountState works before the service runs.
type Disks struct {
	o   Options
	log *slog.Logger

	began   time.Time
	volumes []volume // of the system disk, in the order of mounting

	mu     sync.Mutex // guards system; held during all changes of its disk
	system *device    // the disk that STATE is on, once it is mounted
	known  bool       // it was there before

	data   sync.Mutex // held during all changes of the disks of machine.disks, which may take many minutes
	held   sync.Mutex // guards mounts
	mounts []string   // in the order of mounting

	reset atomic.Pointer[reset] // what Erase wipes; nil: nothing
}

// New makes the service and doesn't start it.
func New(o Options) *Disks {
	option.Default(&o.isDisk, isDisk)
	option.Default(&o.stateDir, boot.StateDir)
	option.Default(&o.varDir, boot.EphemeralDir)
	option.Default(&o.etcDir, "/etc")
	option.Default(&o.idFile, machineIDFile)
	option.Default(&o.firmware, esp.FirmwareDir)
	option.Default(&o.patience, warnAfter)
	option.Default(&o.mount, mountReadOnly)
	option.Default(&o.statfs, unix.Statfs)
	option.Default(&o.Sound, func(context.Context) error { return nil })
	option.Default(&o.before, func(string) error { return nil })
	return &Disks{o: o, log: o.Logs.Logger(ID), began: time.Now(),
		volumes: volumes(map[string]string{boot.LabelState: o.stateDir, boot.LabelEphemeral: o.varDir})}
}

// Service is disks in the graph: up after STATE and EPHEMERAL are mounted.
func (d *Disks) Service() dag.Service {
	return dag.Service{
		ID:         ID,
		Run:        d.run,
		Restart:    dag.RestartOnError,
		StopBudget: stopBudget,
	}
}

func (d *Disks) run(ctx context.Context, h *dag.Handle) error {
	cfg, err := machine.Config(d.o.Store)
	if err != nil {
		return err
	}
	message := "directories of the host"
	if d.o.Mode == boot.Machine {
		if message, err = d.provision(ctx, h, cfg.Machine.Install); err != nil {
			return err
		}
		defer d.unmount()
	}
	if err := d.o.StateReady(); err != nil {
		return err
	}
	if err := d.makeDirectories(); err != nil {
		return err
	}
	if err := d.nameMachine(); err != nil {
		return err
	}
	if err := d.openPlugins(); err != nil {
		d.log.Warn(err.Error() + "; only pod networks that bring plugins of their own miss it")
	}
	space := d.space()
	d.checkSpace(space)
	h.Started(message)
	d.watchSpace(ctx, space)
	return nil
}

// MountState mounts STATE if a disk has one already, before there is a
// configuration that names the disk.
func (d *Disks) MountState(ctx context.Context) (found bool, err error) {
	if d.o.Mode == boot.Container {
		return true, d.wipeDirectories() // they are bind mounts of the host
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.system != nil {
		return true, nil
	}
	disks, seen, err := d.systemDisks(ctx)
	if err == nil && !seen && d.o.Installed && time.Since(d.began) < ownPatience {
		return false, fmt.Errorf("the disk that this system was started from isn't there yet: %w", boot.ErrClosed)
	}
	if err != nil || len(disks) == 0 {
		return false, err
	}
	found, err = d.mountState(ctx, disks[0])
	if err != nil && d.o.Installed { // its configuration is there: nobody is to give it another one
		err = fmt.Errorf("%w; %w", err, boot.ErrClosed)
	}
	return found, err
}

func (d *Disks) mountState(ctx context.Context, dev device) (found bool, err error) {
	state := d.volume(boot.LabelState)
	f, err := d.inspect(dev)
	if err != nil {
		return false, err
	}
	// An image was written to this disk, and it hasn't been booted before.
	if blank, err := d.unformatted(ctx, dev, f, state); err != nil || blank {
		return false, err
	}
	if err := d.mountVolume(ctx, dev, state); err != nil {
		return false, err
	}
	d.system, d.known = &dev, true
	d.log.Info("STATE is on " + dev.Path)
	return true, nil
}

// Known reports whether the node had a STATE before this boot, however the machine was started.
func (d *Disks) Known() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known
}

// systemDisks are the disks with a complete layout of ours. Of several, that one counts which the boot loader was on. Otherwise they are an error: a
// machine that chooses by itself may join the wrong cluster, and a pod may have made one on a disk of its own. A disk of a newer release is an error,
// too. seen is whether the disk of this boot is there, perhaps without STATE.
func (d *Disks) systemDisks(ctx context.Context) (out []device, seen bool, err error) {
	all, err := d.devices()
	if err != nil {
		return nil, false, err
	}
	from := ""
	if d.o.Installed {
		from = esp.StartedFrom(d.o.firmware)
	}
	var contents []found
	for _, own := range []bool{true, false} {
		for _, dev := range all {
			f, err := d.inspect(dev)
			if err != nil {
				d.log.Warn(err.Error() + "; going on without this disk")
				continue
			}
			if f.verdict != newer && f.verdict != ours || own && from != "" && !f.has(from) {
				continue
			}
			seen = seen || own
			if f.verdict == newer || f.pending.step != stepFormat || f.pending.label != boot.LabelState {
				out, contents = append(out, dev), append(contents, f)
			}
		}
		if seen || from == "" {
			break
		}
	}
	switch {
	case len(out) > 1:
		err := fmt.Errorf("%s and %s both hold a Garboard system: unplug the one that this machine isn't to boot from", out[0].Path, out[1].Path)
		if d.o.Installed { // a machine that starts from a medium may be about to be installed anew
			err = fmt.Errorf("%w; %w", err, boot.ErrClosed)
		}
		return nil, true, err
	case len(out) == 0:
		return nil, seen, nil
	case contents[0].verdict == newer:
		return out, seen, d.refuseNewer(out[0], contents[0])
	}
	f, err := d.wipeMarked(ctx, out[0], contents[0])
	if err != nil || f.pending.step == stepFormat && f.pending.label == boot.LabelState {
		return nil, seen, err
	}
	return out, seen, nil
}

// provision prepares the system disk and mounts it.
func (d *Disks) provision(ctx context.Context, h *dag.Handle, install config.Install) (string, error) {
	dev, err := d.choose(ctx, h, install)
	if err != nil {
		return "", err
	}
	consent := consent(install)
	if f, err := d.inspect(dev); err == nil && f.verdict == foreign && consent != "" {
		if err := d.o.Sound(ctx); err != nil {
			return "", fmt.Errorf("%s, which holds %s, isn't erased: %w", dev.Path, f.holds, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.take(ctx, dev, consent); err != nil {
		return "", err
	}
	for _, v := range d.volumes {
		if err := d.mountVolume(ctx, dev, v); err != nil {
			return "", err
		}
	}
	d.system = &dev
	return fmt.Sprintf("STATE and EPHEMERAL of %s (%s)", dev.Path, bytesText(dev.Size)), nil
}

func (d *Disks) systemDisk() *device {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.system
}

// late is an error for a disk that has nothing of this node while one may still appear that has its data: no other disk is begun before.
func (d *Disks) late(f found) error {
	if f.verdict != ours && time.Since(d.began) < lateDisks {
		return fmt.Errorf("waits for disks that come late, for %s after the start, before it begins another one", lateDisks)
	}
	return nil
}

// own is the disk that this system was started from, whose STATE a reset has wiped, or which was written from an image: names and selectors may fit
// another one by now.
func (d *Disks) own() (own device, found bool) {
	if !d.o.Installed {
		return device{}, false
	}
	devices, _ := d.devices() // the caller sees the error, too
	from, fit := esp.StartedFrom(d.o.firmware), 0
	for _, dev := range devices {
		if f, err := d.inspect(dev); err == nil && f.verdict == ours && (from == "" || f.has(from)) {
			own = dev
			fit++
		}
	}
	return own, fit == 1
}

// choose is the disk on which STATE was found, else the one that the
// configuration names or selects, after it has appeared. Kernel names move between
// boots, so the content of a disk is more reliable than its name.
func (d *Disks) choose(ctx context.Context, h *dag.Handle, install config.Install) (device, error) {
	if system := d.systemDisk(); system != nil { // mounted before the configuration was known
		if install.Disk != "" && resolved(install.Disk) != system.Path {
			d.log.Warn(fmt.Sprintf("the system is on %s, while machine.install.disk is %s: going on with %s", system.Path, install.Disk, system.Path))
		}
		return *system, nil
	}
	if install.Disk == "" && install.DiskSelector == (config.DiskSelector{}) {
		return device{}, errors.New("machine.install.disk isn't set, and no disk holds a Garboard system; the disks here:\n" + d.table())
	}
	name := cmp.Or(install.Disk, "of machine.install.diskSelector")
	since, warned := time.Now(), false
	for waiting := false; ; waiting = true {
		// The content is looked at again, too: a disk that comes late may have the node's system, and this may be another run of the service.
		if found, err := d.MountState(ctx); err != nil {
			return device{}, err // the service tries again
		} else if found {
			return *d.systemDisk(), nil
		}
		if dev, found := d.own(); found {
			return dev, nil
		}
		dev, found, why, err := d.chosen(install)
		if err != nil {
			return dev, err
		}
		var late error
		if found {
			f, _ := d.inspect(dev) // what it can't tell isn't ours
			if late = d.late(f); late == nil {
				return dev, nil
			}
		}
		if !waiting && found {
			h.Event(late.Error())
		} else if !waiting {
			h.Event(fmt.Sprintf("Waiting for disk %q to appear", name))
		}
		if !found && !warned && time.Since(since) >= d.o.patience {
			warned = true
			d.log.Warn(fmt.Sprintf("no disk %s since %s; still looking. Plug it in, or correct machine.install.disk or diskSelector; the disks here:\n%s",
				name, time.Since(since).Round(time.Second), d.selection(why)))
		}
		if !sleep.For(ctx, pollEvery) {
			return device{}, ctx.Err()
		}
	}
}

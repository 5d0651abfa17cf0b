package disks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
)

// consent is what allows the system disk's content to be erased; "": nothing does.
func consent(install config.Install) string {
	switch {
	case install.Wipe:
		return "machine.install.wipe is set"
	case install.DiskSelector.NamesSerial():
		return "machine.install.diskSelector has its serial number"
	}
	return ""
}

// provision prepares the system disk and mounts it.
func (d *Disks) provision(ctx context.Context, h *dag.Handle, install config.Install) (string, error) {
	dev, err := d.choose(ctx, h, install)
	if err != nil {
		return "", err
	}
	consent := consent(install)
	if f, err := dev.Inspect(); err == nil && f.Verdict == disk.Foreign && consent != "" {
		if err := d.o.Sound(ctx); err != nil {
			return "", fmt.Errorf("%s, which holds %s, isn't erased: %w", f.Path, f.Holds, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = dev.Path
	if err := d.take(ctx, dev, consent); err != nil {
		return "", err
	}
	for _, v := range d.volumes {
		if err := d.Keeper.Open(ctx, dev, v); err != nil {
			return "", err
		}
		if err := d.keepOwn(); err != nil {
			return "", err
		}
	}
	d.system.Store(&dev)
	return fmt.Sprintf("STATE and EPHEMERAL of %s (%s)", dev.Path, disk.SizeText(dev.Size)), nil
}

// take makes dev the system disk: it partitions an empty one, finishes an
// incomplete one, doesn't change a complete one, and erases others only with consent.
func (d *Disks) take(ctx context.Context, dev disk.Disk, consent string) error {
	f, err := dev.Inspect()
	if err == nil {
		f, err = d.wipeMarked(ctx, f)
	}
	if err != nil {
		return err
	}
	if f.Verdict == disk.Ours {
		if err := d.Keeper.Grow(ctx, f, boot.LabelEphemeral, 0); err != nil {
			return fmt.Errorf("grow the partitions of %s: %w", f.Path, err)
		}
		return d.Keeper.Finish(ctx, f, d.volumes)
	}
	if err := errors.Join(d.mayTake(f, consent), d.haveKeys()); err != nil {
		return err
	}
	switch f.Verdict {
	case disk.Foreign:
		d.log.Warn(fmt.Sprintf("erasing %s, which held %s: %s", f.Path, f.Holds, consent))
	case disk.Empty:
		d.log.Info(fmt.Sprintf("%s is empty: making the system's partitions", f.Path))
	case disk.Unfinished:
		d.log.Warn(fmt.Sprintf("%s has an incomplete layout after an interruption: making the system's partitions again", f.Path))
	}
	return d.Keeper.LayOut(ctx, f, boot.Places(f.Size), d.volumes)
}

// mayTake is nil if the system's partitions may be made on a disk that has none.
func (d *Disks) mayTake(f disk.Disk, consent string) error {
	switch f.Verdict {
	case disk.Newer:
		return d.refuseNewer(f)
	case disk.Foreign:
		if err := d.MayErase(f, consent, "machine.install.disk", "machine.install.wipe"); err != nil {
			return err
		}
	}
	if f.Size >= boot.MinDisk {
		return nil
	}
	return d.Keeper.Disks.Refuse(f, fmt.Sprintf("is too small: %s of at least %s", disk.SizeText(f.Size), disk.SizeText(boot.MinDisk)),
		"Name another disk in machine.install.disk")
}

// Place says what an installation with these settings has of which disk, and what is lost there. The error is why
// there is none.
func (d *Disks) Place(install config.Install) (string, error) {
	dev, there, why, err := d.chosen(install)
	if err != nil {
		return "", err
	}
	if !there {
		return "", fmt.Errorf("no disk %s. The disks here:\n%s", cmp.Or(install.Disk, "fits machine.install.diskSelector"), d.Keeper.Disks.Text(why))
	}
	if dev.Err != nil {
		return "", dev.Err
	}
	if dev.Verdict == disk.Ours {
		return fmt.Sprintf("%s (%s) has the partitions of a system, which stay", dev.Path, disk.SizeText(dev.Size)), nil
	}
	if err := d.mayTake(dev, consent(install)); err != nil {
		return "", err
	}
	lost := "it is empty"
	if dev.Verdict == disk.Foreign {
		lost = "all that is on it is lost: " + dev.Holds
	}
	parts := lists.Of(boot.Places(dev.Size), func(p boot.Place) string { return p.Label + " " + disk.SizeText(p.Size) })
	return fmt.Sprintf("the system comes onto %s (%s): %s; %s", dev.Path, disk.SizeText(dev.Size), strings.Join(parts, ", "), lost), nil
}

// refuseNewer refuses a disk of a newer release, even with
// machine.install.wipe: that setting stays in a configuration, and an older
// release may be booted by mistake.
func (d *Disks) refuseNewer(f disk.Disk) error {
	return d.Keeper.Disks.Refuse(f, fmt.Sprintf("holds %s, and isn't touched", f.Holds),
		"Boot that release. To use the disk with this one, reset the node with that release first (gbctl reset), and set machine.install.wipe: true")
}

const (
	// pollEvery is how often it looks for a missing disk.
	pollEvery = 500 * time.Millisecond
	// warnAfter is how long a disk may be missing before that is logged:
	// controllers of real machines take that long to detect theirs.
	warnAfter = 10 * time.Second
)

// own is the disk that this system was started from, whose STATE a reset has wiped, or which was written from an
// image: names and selectors may fit another one by now.
func (d *Disks) own() (own disk.Disk, found bool) {
	if !d.o.Installed {
		return own, false
	}
	all, _ := d.Keeper.Disks.All() // the caller sees the error, too
	from, fit := esp.StartedFrom(d.Firmware), 0
	for _, f := range all {
		if f.Err == nil && f.Verdict == disk.Ours && (from == "" || f.Has(from)) {
			own = f
			fit++
		}
	}
	return own, fit == 1
}

// chosen is the disk that the configuration names and selects, if it is there.
func (d *Disks) chosen(install config.Install) (disk.Disk, bool, disk.Rejected, error) {
	all, err := d.Keeper.Disks.All()
	path := disk.Resolved(install.Disk)
	why := disk.Rejected{}
	for _, f := range all {
		reason := d.Unfit(f, install.Disk, install.DiskSelector)
		if f.Err != nil && install.Disk == "" {
			reason = f.Err.Error()
		}
		if reason == "" && (install.Disk == "" || path == f.Path) {
			return f, true, nil, nil
		}
		why[f.Path] = reason
	}
	return disk.Disk{}, false, why, err
}

// choose is the disk on which STATE was found, else the one that the
// configuration names or selects, after it has appeared. Kernel names move between
// boots, so the content of a disk is more reliable than its name.
func (d *Disks) choose(ctx context.Context, h *dag.Handle, install config.Install) (disk.Disk, error) {
	if system := d.System(); system != nil { // mounted before the configuration was known
		if install.Disk != "" && disk.Resolved(install.Disk) != system.Path {
			d.log.Warn(fmt.Sprintf("the system is on %s, while machine.install.disk is %s: going on with %s", system.Path, install.Disk, system.Path))
		}
		return *system, nil
	}
	if install.Disk == "" && install.DiskSelector == (config.DiskSelector{}) {
		return disk.Disk{}, errors.New("machine.install.disk isn't set, and no disk holds a Garboard system; the disks here:\n" + d.Keeper.Disks.Text(nil))
	}
	name := cmp.Or(install.Disk, "of machine.install.diskSelector")
	since, warned := time.Now(), false
	for waiting := false; ; waiting = true {
		// The content is looked at again, too: a disk that comes late may have the node's system, and this may be
		// another run of the service.
		if state, err := d.MountState(ctx); err != nil {
			return disk.Disk{}, err // the service tries again
		} else if state == configuration.StateMounted {
			return *d.System(), nil
		}
		if dev, found := d.own(); found {
			return dev, nil
		}
		dev, found, why, err := d.chosen(install)
		if err != nil {
			return dev, err
		}
		if found {
			if err = d.Keeper.Disks.Late(dev); err == nil {
				return dev, nil
			}
		}
		if !waiting && found {
			h.Event(err.Error())
		} else if !waiting {
			h.Event(fmt.Sprintf("Waiting for disk %q to appear", name))
		}
		if !found && !warned && time.Since(since) >= d.o.patience {
			warned = true
			d.log.Warn(fmt.Sprintf("no disk %s since %s; still looking. Plug it in, or correct machine.install.disk or diskSelector; the disks here:\n%s",
				name, time.Since(since).Round(time.Second), d.Keeper.Disks.Text(why)))
		}
		if !sleep.For(ctx, pollEvery) {
			return disk.Disk{}, ctx.Err()
		}
	}
}

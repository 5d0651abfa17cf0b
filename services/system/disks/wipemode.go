package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
)

const (
	// slowest is what a disk writes in a second, at least: what is to be overwritten has that much time.
	slowest = 10 << 20
	// tellEvery is how often users hear how much of a disk is overwritten.
	tellEvery = 10 * time.Second
)

// Wiping is the error of a mode of boot.WipeModes that isn't possible here for these volumes and disks. The remarks say
// what users may not expect of it.
func (d *Disks) Wiping(mode string, labels []string, users []UserDisk) (remarks []string, err error) {
	system := d.System()
	switch {
	case mode == "":
		return nil, nil
	case d.o.Mode == boot.Container:
		return nil, errors.New("a node in a container has no disks of its own; a reset removes its files")
	case system == nil:
		return nil, errors.New("the node has no system disk yet")
	}
	here, err := system.Inspect() // its table may be newer
	if err != nil {
		return nil, err
	}
	devices := []disk.Disk{here}
	for _, u := range users {
		dev, _ := disk.At(u.Path) // it may have no table
		devices = append(devices, dev)
	}
	if mode == boot.WipeOverwrite {
		return []string{fmt.Sprintf("%s is overwritten after the API has ended: that takes some minutes for each 10 GB, and the console shows how far it is", disk.SizeText(extent(here, labels, users)))}, nil
	}
	for _, dev := range devices {
		if mode == boot.WipeDiscard && !dev.Discards() {
			return nil, fmt.Errorf("%s can't discard data: use --wipe-mode %s", dev.Path, boot.WipeOverwrite)
		}
	}
	if mode == boot.WipeKeys {
		return d.plain(here, labels, users), nil
	}
	return nil, nil
}

// plain has the volumes and disks that aren't encrypted, and so have no key slots that could be destroyed.
func (d *Disks) plain(system disk.Disk, labels []string, users []UserDisk) (remarks []string) {
	const as = "is wiped as without --wipe-mode: "
	for _, v := range boot.Wiped(labels) {
		if v.Holds == "" {
			continue
		}
		p, err := system.Device(v.Label)
		sealed := false
		if err == nil {
			sealed, err = disk.Sealed(p.Path)
		}
		if !sealed || err != nil {
			remarks = append(remarks, v.Label+" "+as+"it isn't encrypted")
		}
	}
	for _, u := range users {
		remarks = append(remarks, u.Path+" "+as+"unless all of its partitions are encrypted")
	}
	return remarks
}

// extent is how many bytes a reset wipes.
func extent(system disk.Disk, labels []string, users []UserDisk) (bytes int64) {
	for _, v := range boot.Wiped(labels) {
		if p, err := system.Partition(v.Label); err == nil {
			bytes += p.Size
		}
	}
	for _, u := range users {
		bytes += u.Size
	}
	return bytes
}

// EraseTime is how much longer Erase may take than without a mode.
func (d *Disks) EraseTime() time.Duration {
	r := d.reset.Load()
	if r == nil || r.mode != boot.WipeOverwrite && r.mode != boot.WipeDiscard {
		return 0
	}
	system, err := r.system.Inspect()
	if err != nil {
		return 0 // then nothing can be wiped either
	}
	return time.Duration(extent(system, r.labels, r.users)/slowest) * time.Second
}

// discard has the disk forget a partition, if the mode is that. A disk that can't, although it has said so, is wiped as
// without a mode.
func (d *Disks) discard(ctx context.Context, file *os.File, p disk.Partition, mode string) {
	if mode != boot.WipeDiscard {
		return
	}
	if err := p.Discard(ctx, file); err != nil {
		d.log.Warn(fmt.Sprintf("%s isn't discarded, and is wiped as without --wipe-mode: %v", p.Label, err))
	}
}

// telling tells users how much of a volume or disk is overwritten.
func (d *Disks) telling(what string, size int64) func(done int64) {
	last := time.Now()
	return func(done int64) {
		if time.Since(last) < tellEvery {
			return
		}
		last = time.Now()
		d.log.Info(fmt.Sprintf("overwriting %s: %s of %s, %d %%", what, disk.SizeText(done), disk.SizeText(size), done*100/size))
	}
}

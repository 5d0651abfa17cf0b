package disks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"golang.org/x/sys/unix"
)

// mkfsTimeout: mkfs writes some MiB per TiB, which takes seconds even on a
// slow USB disk under emulation.
const mkfsTimeout = 5 * time.Minute

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

// take makes dev the system disk: it partitions an empty one, finishes an
// incomplete one, doesn't change a complete one, and erases others only with consent.
func (d *Disks) take(ctx context.Context, dev device, consent string) error {
	f, err := d.inspect(dev)
	if err != nil {
		return err
	}
	if f, err = d.wipeMarked(ctx, dev, f); err != nil {
		return err
	}
	switch f.verdict {
	case newer:
		return d.refuseNewer(dev, f)
	case foreign:
		if err := d.mayWipe(dev, f, consent, "machine.install.disk", "machine.install.wipe"); err != nil {
			return err
		}
		d.log.Warn(fmt.Sprintf("erasing %s, which held %s: %s", dev.Path, f.holds, consent))
		return d.layOutSystem(ctx, dev)
	case empty:
		d.log.Info(fmt.Sprintf("%s is empty: making the system's partitions", dev.Path))
		return d.layOutSystem(ctx, dev)
	case unfinished:
		d.log.Warn(fmt.Sprintf("%s has an incomplete layout after an interruption: making the system's partitions again", dev.Path))
		return d.layOutSystem(ctx, dev)
	}
	if err := d.grow(ctx, dev, f, boot.LabelEphemeral, 0); err != nil {
		return fmt.Errorf("grow the partitions of %s: %w", dev.Path, err)
	}
	return d.finish(ctx, dev, f, d.volumes)
}

// mayWipe is nil if the content of the disk has to be erased and may be. consent says what allows it; name and allow are the settings that
// choose the disk, and that could allow it.
func (d *Disks) mayWipe(dev device, f found, consent, name, allow string) error {
	medium := d.medium(dev, f)
	busy, err := dev.inUse()
	another := "Name another disk in " + name
	switch {
	case err != nil:
		return err
	case medium != "":
		return d.refuse(dev, fmt.Sprintf("%s (%s)", medium, f.holds), another)
	case dev.ReadOnly:
		return d.refuse(dev, "is read-only", another)
	case busy != "":
		return d.refuse(dev, "is in use: "+busy, another)
	case f.data(): // names of disks may have changed since somebody allowed it
		return d.refuse(dev, fmt.Sprintf("has the data of other machine.disks (%s), and isn't touched", f.holds), another+", or erase this one first: gbctl -n ADDRESS reset --user-disks-to-wipe")
	case consent == "":
		return d.refuse(dev, fmt.Sprintf("holds %s, and isn't touched", f.holds), fmt.Sprintf("%s, or set %s: true to erase this one", another, allow))
	}
	return nil
}

// Place says what an installation with these settings has of which disk, and what is lost there. The error is why there is none.
func (d *Disks) Place(install config.Install) (string, error) {
	dev, there, why, err := d.chosen(install)
	if err != nil {
		return "", err
	}
	if !there {
		return "", fmt.Errorf("no disk %s. The disks here:\n%s", cmp.Or(install.Disk, "fits machine.install.diskSelector"), d.selection(why))
	}
	f, err := d.inspect(dev)
	if err != nil {
		return "", err
	}
	lost := "it is empty"
	switch f.verdict {
	case ours:
		return fmt.Sprintf("%s (%s) has the partitions of a system, which stay", dev.Path, bytesText(dev.Size)), nil
	case newer:
		return "", d.refuseNewer(dev, f)
	case foreign:
		if err := d.mayWipe(dev, f, consent(install), "machine.install.disk", "machine.install.wipe"); err != nil {
			return "", err
		}
		lost = "all that is on it is lost: " + f.holds
	}
	if err := d.largeEnough(dev); err != nil {
		return "", err
	}
	parts := lists.Of(boot.Places(dev.Size), func(p boot.Place) string { return p.Label + " " + bytesText(p.Size) })
	return fmt.Sprintf("the system comes onto %s (%s): %s; %s", dev.Path, bytesText(dev.Size), strings.Join(parts, ", "), lost), nil
}

// largeEnough refuses a disk that has no room for the system.
func (d *Disks) largeEnough(dev device) error {
	if dev.Size >= boot.MinDisk {
		return nil
	}
	return d.refuse(dev, fmt.Sprintf("is too small: %s of at least %s", bytesText(dev.Size), bytesText(boot.MinDisk)), "Name another disk in machine.install.disk")
}

// refuse returns an error with the reason, the next step, and the list of disks.
func (d *Disks) refuse(dev device, why, next string) error {
	return fmt.Errorf("disk %s %s. %s. The disks here:\n%s", dev.Path, why, next, d.table())
}

// refuseNewer refuses a disk of a newer release, even with
// machine.install.wipe: that setting stays in a configuration, and an older
// release may be booted by mistake.
func (d *Disks) refuseNewer(dev device, f found) error {
	return d.refuse(dev, fmt.Sprintf("holds %s, and isn't touched", f.holds),
		"Boot that release. To use the disk with this one, reset the node with that release first (gbctl reset), and set machine.install.wipe: true")
}

func (d *Disks) layOutSystem(ctx context.Context, dev device) error {
	if err := d.largeEnough(dev); err != nil {
		return err
	}
	return d.layOut(ctx, dev, boot.Places(dev.Size), d.volumes)
}

// layOut makes the whole disk ours, with these partitions and file systems. It writes the journal first, so that it is
// repeated if it is interrupted.
func (d *Disks) layOut(ctx context.Context, dev device, places []boot.Place, volumes []volume) error {
	file, err := openDisk(dev)
	if err != nil {
		return err
	}
	defer file.Close()

	table := newTable(dev, places)
	steps := []step{
		{"journal", func() error { return writeJournal(file, journal{step: stepLayout}) }},
		{"erase", func() error { return erase(file, dev, table) }},
		{"table", func() error { return writeTable(file, dev, table) }},
		{"partitions", func() error { return showPartitions(ctx, file, dev, table) }},
	}
	for _, v := range volumes {
		steps = append(steps, d.format(ctx, dev, table, v))
	}
	return d.do(ctx, append(steps, finished(file))...)
}

// step is a part of the work that the journal covers.
type step struct {
	name string
	do   func() error
}

// finished is the last step.
func finished(file *os.File) step {
	return step{"done", func() error { return writeJournal(file, journal{}) }}
}

func (d *Disks) do(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		if err := errors.Join(ctx.Err(), d.o.before(s.name)); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// openDisk opens an unused disk for writing: the kernel refuses to open a disk
// exclusively that is mounted or part of another device (open(2), O_EXCL on block
// devices). It doesn't stay exclusive, because mkfs must be able to open a partition.
func openDisk(dev device) (*os.File, error) {
	free, err := os.OpenFile(dev.Path, os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	defer free.Close()
	return os.OpenFile(dev.Path, os.O_RDWR, 0)
}

// newTable is a layout as a partition table.
func newTable(dev device, places []boot.Place) *gpt.Table {
	t := &gpt.Table{LogicalSectorSize: dev.Sector, PhysicalSectorSize: dev.Sector, ProtectiveMBR: true}
	for i, p := range places {
		t.Partitions = append(t.Partitions, newPartition(dev, i+1, p))
	}
	return t
}

func newPartition(dev device, n int, p boot.Place) *gpt.Partition {
	sectors := func(bytes int64) uint64 { return uint64(bytes / int64(dev.Sector)) }
	return &gpt.Partition{
		Index:      n,
		Name:       p.Label,
		Type:       gpt.Type(p.Type),
		Attributes: p.Attributes,
		Start:      sectors(p.Start),
		End:        sectors(p.Start+p.Size) - 1,
	}
}

// erase zeroes what other systems would recognise: the edges of the disk, and
// those of each new partition. The journal's sector stays.
func erase(file *os.File, dev device, t *gpt.Table) error {
	zero := func(at, n int64) error {
		_, err := file.WriteAt(make([]byte, n), at)
		return err
	}
	errs := []error{
		zero(0, journalAt),
		zero(journalAt+4096, edge-journalAt-4096),
		zero(dev.Size-edge, edge),
	}
	for _, p := range t.Partitions {
		start, end := int64(p.Start)*int64(dev.Sector), int64(p.End+1)*int64(dev.Sector)
		errs = append(errs, zero(start, edge), zero(end-edge, edge))
	}
	if err := errors.Join(append(errs, file.Sync())...); err != nil {
		return fmt.Errorf("erase %s: %w", dev.Path, err)
	}
	return nil
}

// bootNothing is int 18h, with which a boot record gives up (BIOS Boot Specification 1.01, 6.7).
var bootNothing = []byte{0xcd, 0x18}

func writeTable(file *os.File, dev device, t *gpt.Table) error {
	if err := t.Write(file, dev.Size); err != nil {
		return fmt.Errorf("write partition table of %s: %w", dev.Path, err)
	}
	// A BIOS starts each disk that has a table. Until there is a boot loader, this one tells it to try the next.
	if _, err := file.WriteAt(bootNothing, 0); err != nil {
		return fmt.Errorf("write boot record of %s: %w", dev.Path, err)
	}
	if err := unix.IoctlSetInt(int(file.Fd()), unix.BLKRRPART, 0); err != nil {
		return fmt.Errorf("make the kernel read the partition table of %s: %w", dev.Path, err)
	}
	return nil
}

// format makes the layer and the file system of a volume, and ends after they
// are on the disk.
func (d *Disks) format(ctx context.Context, dev device, t *gpt.Table, v volume) step {
	return step{"format " + v.Label, func() error {
		path, err := partitionDevice(ctx, dev, t, v.Label)
		if err == nil {
			err = v.layer.create(ctx, path)
		}
		if err != nil {
			return fmt.Errorf("create %s on %s: %w", v.Label, dev.Path, err)
		}
		if path, err = v.open(ctx, dev, t); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, mkfsTimeout)
		defer cancel()
		if err := d.o.Processes.Run(ctx, fsTypes[v.FileSystem].create(v.Label, path)); err != nil {
			return err
		}
		file, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		if err := errors.Join(file.Sync(), file.Close()); err != nil {
			return fmt.Errorf("sync %s: %w", path, err)
		}
		return nil
	}}
}

// finish makes the missing file systems of a complete layout: a reset has
// zeroed one, or its formatting was interrupted.
func (d *Disks) finish(ctx context.Context, dev device, f found, volumes []volume) error {
	if err := d.formatPending(ctx, dev, f, volumes); err != nil {
		return err
	}
	for _, v := range volumes {
		if d.isMounted(v.Dir) || f.pending.interrupted(v) {
			continue
		}
		if blank, err := d.unformatted(ctx, dev, f, v); err != nil {
			return err
		} else if !blank {
			continue
		}
		d.log.Warn(fmt.Sprintf("%s on %s has no file system: making one", v.Label, dev.Path))
		if err := d.formatAgain(ctx, dev, f, v); err != nil {
			return err
		}
	}
	return nil
}

// formatPending makes the file system whose making was interrupted. It comes before all others, because the journal has room for one.
func (d *Disks) formatPending(ctx context.Context, dev device, f found, volumes []volume) error {
	at := slices.IndexFunc(volumes, func(v volume) bool {
		_, err := f.partition(dev, v.Label)
		return err == nil && f.pending.interrupted(v) && !d.isMounted(v.Dir)
	})
	if at < 0 {
		return nil
	}
	d.log.Warn(fmt.Sprintf("%s on %s has half a file system: making it anew", volumes[at].Label, dev.Path))
	return d.formatAgain(ctx, dev, f, volumes[at])
}

// unformatted reports whether a volume begins with zeros only; content other
// than our layer and file system is an error.
func (d *Disks) unformatted(ctx context.Context, dev device, f found, v volume) (bool, error) {
	path, err := partitionDevice(ctx, dev, f.table, v.Label)
	if err != nil {
		return false, err
	}
	layered, err := v.layer.exists(path)
	if err == nil && layered {
		path, err = v.layer.open(ctx, path)
	}
	if err != nil {
		return false, fmt.Errorf("open %s of %s: %w", v.Label, dev.Path, err)
	}
	file, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return false, err
	}
	c, err := identify(file, size)
	if err != nil || layered && c.kind == v.FileSystem {
		return false, err
	}
	zero, err := blank(file, 0, edge)
	if err != nil || zero {
		return zero, err
	}
	holds := "unknown data"
	if c.kind != "" {
		holds = c.String()
	}
	return false, d.refuse(dev, fmt.Sprintf("holds %s in its partition %s, where an %s file system was", holds, v.Label, v.FileSystem),
		"Zero the beginning of that partition to have it made again")
}

func (d *Disks) formatAgain(ctx context.Context, dev device, f found, v volume) error {
	file, err := os.OpenFile(dev.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	begin := step{"journal", func() error { return writeJournal(file, journal{step: stepFormat, label: v.Label}) }}
	return d.do(ctx, begin, d.format(ctx, dev, f.table, v), finished(file))
}

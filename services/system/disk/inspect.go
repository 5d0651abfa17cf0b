package disk

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"golang.org/x/sys/unix"
)

// Verdict on the content of a disk.
type Verdict int

const (
	Empty      Verdict = iota // may be used
	Ours                      // has our layout
	Unfinished                // ours, but its layout is incomplete
	Newer                     // ours, in a layout that only a newer release knows
	Foreign                   // of another system
)

// Edge is how much at the beginning and at the end must be zero on an empty
// disk: partition tables and the metadata of nearly all formats are there.
const Edge = 1 << 20

const dosTable = "a DOS partition table"

// Inspect reads the content of the disk and changes nothing.
func (d Disk) Inspect() (Disk, error) {
	d.Verdict, d.Holds, d.Table, d.Pending = Empty, "", nil, Journal{}
	file, err := os.Open(d.Path)
	if err == nil {
		defer file.Close()
		if err = d.examine(file); err != nil {
			err = fmt.Errorf("inspect %s: %w", d.Path, err)
		}
	}
	if d.Err = err; err != nil {
		d.Holds = "?"
	}
	d.Holds = cmp.Or(d.Holds, map[Verdict]string{Empty: "nothing", Ours: "Garboard", Unfinished: "Garboard, incomplete"}[d.Verdict])
	return d, err
}

func (d *Disk) examine(file *os.File) (err error) {
	if d.Pending, err = readJournal(file); err != nil {
		return err
	}
	switch d.Pending.Step {
	case stepNone, StepFormat, StepWipe, StepLayout, StepEncrypt:
	default:
		d.Verdict, d.Holds = Newer, "a Garboard system that a newer release was changing"
		return nil
	}
	whole, err := identify(file, d.Size)
	if err != nil {
		return err
	}
	if whole.Kind != "" {
		d.Verdict, d.Holds = Foreign, describe(whole)
		return nil
	}
	if err := d.examineTable(file); err != nil {
		return err
	}
	// A layout was begun. The disk is foreign if it has what another system has made since then: all of that was
	// erased at first, unless it was allowed to be.
	if d.Pending.Step == StepLayout && d.Holds != dosTable && !slices.ContainsFunc(d.entries(), isOthers) {
		d.Verdict, d.Holds, d.Table = Unfinished, "", nil
	}
	return nil
}

// isOthers reports whether a partition is of a type that no release has made.
func isOthers(p *gpt.Partition) bool {
	return !isMedium(p) && !is(p, boot.TypeData) && !slices.ContainsFunc(boot.Volumes, func(v boot.Volume) bool { return is(p, v.Type) })
}

func is(p *gpt.Partition, kind string) bool { return strings.EqualFold(string(p.Type), kind) }

func (d *Disk) examineTable(file *os.File) error {
	table, err := readTable(file, *d)
	if err == nil {
		d.Table = table
		if n := d.Layout(); n > boot.Layout {
			return d.examineNewer(file, n)
		}
		if isOurs(*d) {
			d.Verdict = Ours
			return nil
		}
		d.Verdict = Foreign
		d.Holds, err = describeTable(file, *d)
		return err
	}
	mbr, err := readAt(file, 0, 512)
	if err != nil {
		return err
	}
	// A DOS partition table: the signature of a boot sector, and an entry in use. That of type EE begins a GPT.
	if bytes.HasSuffix(mbr, []byte{0x55, 0xaa}) && len(bytes.TrimLeft(mbr[446:510], "\x00")) > 0 {
		d.Verdict, d.Holds = Foreign, dosTable
		if mbr[450] == 0xee {
			d.Holds = "a damaged GPT partition table"
		}
		return nil
	}
	for _, at := range []int64{0, d.Size - Edge} {
		if zero, err := blank(file, at, Edge); err != nil {
			return err
		} else if !zero {
			d.Verdict, d.Holds = Foreign, "unknown data"
		}
	}
	return nil
}

// examineNewer examines a disk with an unknown layout. Its content isn't needed
// only after a reset, when its volumes are zeros.
func (d *Disk) examineNewer(file *os.File, layout int) error {
	d.Verdict = Newer
	d.Holds = fmt.Sprintf("a Garboard system of a newer release (disk layout %d; this release knows up to %d)", layout, boot.Layout)
	for _, v := range boot.Volumes {
		if v.FileSystem == "" {
			continue
		}
		p, err := d.Partition(v.Label)
		if err != nil {
			return nil // that layout has another name for it
		}
		if zero, err := blank(file, p.Start, Edge); err != nil || !zero {
			return err
		}
	}
	d.Verdict, d.Holds = Foreign, fmt.Sprintf("the partitions of a newer Garboard release (disk layout %d), which were reset", layout)
	return nil
}

func describe(c Content) string {
	if slices.Contains([]string{"LUKS", "LVM2", "Linux RAID", "ZFS", "bcache", "Ceph BlueStore", "swap"}, c.Kind) {
		return c.String()
	}
	return strings.Replace(c.String(), c.Kind, c.Kind+" file system", 1)
}

// isOurs reports whether the table has every partition of its layout with its
// own type, and no other partition but that of an image.
func isOurs(d Disk) bool {
	want, all := boot.Partitions(d.Layout()), slices.DeleteFunc(d.entries(), isMedium)
	return len(all) == len(want) && !slices.ContainsFunc(all, func(p *gpt.Partition) bool {
		return !slices.ContainsFunc(want, func(v boot.Volume) bool { return v.Label == p.Name && is(p, v.Type) })
	})
}

func isMedium(p *gpt.Partition) bool { return p.Name == boot.LabelMedium && is(p, boot.TypeMedium) }

// describeTable lists the partitions with their content.
func describeTable(file *os.File, d Disk) (string, error) {
	var parts []string
	for _, p := range d.entries() {
		at := d.partition(p)
		c, err := identify(io.NewSectionReader(file, at.Start, at.Size), at.Size)
		if err != nil {
			return "", err
		}
		text := fmt.Sprintf("%q", p.Name)
		if c.Kind != "" {
			text += " (" + c.String() + ")"
		}
		parts = append(parts, text)
	}
	if len(parts) == 0 {
		return "an empty GPT partition table", nil
	}
	return "partitions " + strings.Join(parts, ", "), nil
}

// readTable reads a GPT. Its library makes room for as many entries as a header names, which may be more than there
// is memory: so the headers are looked at before.
func readTable(file *os.File, d Disk) (*gpt.Table, error) {
	const size, most = 128, 1024 // of an entry in bytes, and how many; 128 are usual
	for _, at := range []int64{int64(d.Sector), d.Size - int64(d.Sector)} {
		header, err := readAt(file, at, 92)
		if err != nil {
			return nil, err
		}
		if entries := header[80:]; binary.LittleEndian.Uint32(entries) > most || binary.LittleEndian.Uint32(entries[4:]) > size {
			if bytes.HasPrefix(header, []byte("EFI PART")) {
				return nil, errors.New("a GPT of an unusual size")
			}
		}
	}
	return gpt.Read(file, d.Sector, d.Sector)
}

// entries are the partitions of the table, if there is one.
func (d Disk) entries() []*gpt.Partition {
	if d.Table == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(d.Table.Partitions), func(p *gpt.Partition) bool { return p.Type == gpt.Unused })
}

// Layout is the number of the disk's layout; 0 for a disk that has none.
func (d Disk) Layout() int {
	for _, p := range d.entries() {
		if is(p, boot.TypeMeta) {
			return boot.LayoutOf(p.Attributes)
		}
	}
	return 0
}

// Last is the partition with the highest address; nil if there is none.
func (d Disk) Last() (last *gpt.Partition) {
	for _, p := range d.entries() {
		if last == nil || p.Start > last.Start {
			last = p
		}
	}
	return last
}

// Data reports whether the disk has partitions of machine.disks, and no others.
func (d Disk) Data() bool {
	all := d.entries()
	return len(all) > 0 && !slices.ContainsFunc(all, func(p *gpt.Partition) bool { return !is(p, boot.TypeData) })
}

// Has reports whether the disk has a partition with a GUID.
func (d Disk) Has(guid string) bool {
	return slices.ContainsFunc(d.entries(), func(p *gpt.Partition) bool { return strings.EqualFold(p.GUID, guid) })
}

// Parts are the partitions with their sizes, for users.
func (d Disk) Parts() string {
	return strings.Join(lists.Of(d.entries(), func(p *gpt.Partition) string { return p.Name + " " + SizeText(int64(p.Size)) }), ", ")
}

// NewTable is a layout as a partition table.
func (d Disk) NewTable(places []boot.Place) *gpt.Table {
	t := &gpt.Table{LogicalSectorSize: d.Sector, PhysicalSectorSize: d.Sector, ProtectiveMBR: true}
	for i, p := range places {
		t.Partitions = append(t.Partitions, d.NewPartition(i+1, p))
	}
	return t
}

// NewPartition is a place as a partition with a number.
func (d Disk) NewPartition(n int, p boot.Place) *gpt.Partition {
	sectors := func(bytes int64) uint64 { return uint64(bytes / int64(d.Sector)) }
	return &gpt.Partition{
		Index: n, Name: p.Label, Type: gpt.Type(p.Type), Attributes: p.Attributes, Start: sectors(p.Start), End: sectors(p.Start+p.Size) - 1,
	}
}

// bootNothing is int 18h, with which a boot record gives up (BIOS Boot Specification 1.01, 6.7).
var bootNothing = []byte{0xcd, 0x18}

// WriteTable writes the table of a disk that nothing uses.
func (d Disk) WriteTable(file *os.File) error {
	if err := d.Table.Write(file, d.Size); err != nil {
		return fmt.Errorf("write partition table of %s: %w", d.Path, err)
	}
	// A BIOS starts each disk that has a table. Until there is a boot loader, this one tells it to try the next.
	if _, err := file.WriteAt(bootNothing, 0); err != nil {
		return fmt.Errorf("write boot record of %s: %w", d.Path, err)
	}
	if err := unix.IoctlSetInt(int(file.Fd()), unix.BLKRRPART, 0); err != nil {
		return fmt.Errorf("make the kernel read the partition table of %s: %w", d.Path, err)
	}
	return nil
}

package disks

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
)

// verdict on the content of a disk.
type verdict int

const (
	empty      verdict = iota // may be used
	ours                      // has our layout
	unfinished                // ours, but its layout is incomplete
	newer                     // ours, in a layout that only a newer release knows
	foreign                   // of another system
)

// edge is how much at the beginning and at the end must be zero on an empty
// disk: partition tables and the metadata of nearly all formats are there.
const edge = 1 << 20

// found is the content of a disk.
type found struct {
	verdict verdict
	holds   string     // in words, for newer and foreign ones
	table   *gpt.Table // nil without a valid one
	pending journal
}

func (f found) String() string {
	return cmp.Or(f.holds, map[verdict]string{empty: "nothing", ours: "Garboard", unfinished: "Garboard, incomplete"}[f.verdict])
}

const dosTable = "a DOS partition table"

// inspect reads the disk and changes nothing.
func (d *Disks) inspect(dev device) (found, error) {
	file, err := os.Open(dev.Path)
	if err != nil {
		return found{}, err
	}
	defer file.Close()
	f, err := examine(file, dev)
	if err != nil {
		return found{}, fmt.Errorf("inspect %s: %w", dev.Path, err)
	}
	return f, nil
}

func examine(file *os.File, dev device) (found, error) {
	f := found{}
	var err error
	if f.pending, err = readJournal(file); err != nil {
		return f, err
	}
	switch f.pending.step {
	case stepNone, stepFormat, stepWipe, stepLayout:
	default:
		f.verdict, f.holds = newer, "a Garboard system that a newer release was changing"
		return f, nil
	}
	whole, err := identify(file, dev.Size)
	if err != nil {
		return f, err
	}
	if whole.kind != "" {
		f.verdict, f.holds = foreign, describe(whole)
		return f, nil
	}
	if f.pending.step == stepLayout { // whoever has used the disk since then hasn't removed it
		return examineUnfinished(file, dev, f)
	}
	return examineTable(file, dev, f)
}

// examineUnfinished examines a disk whose layout was begun. It is foreign if it has what another system has made: all of that was erased at first, unless
// it was allowed to be.
func examineUnfinished(file *os.File, dev device, f found) (found, error) {
	all, err := examineTable(file, dev, f)
	if err != nil {
		return f, err
	}
	if all.holds == dosTable || all.table != nil && slices.ContainsFunc(all.table.Partitions, func(p *gpt.Partition) bool {
		return p.Type != gpt.Unused && !isMedium(p) && !strings.EqualFold(string(p.Type), boot.TypeData) && !slices.ContainsFunc(boot.Volumes, func(v boot.Volume) bool { return strings.EqualFold(v.Type, string(p.Type)) })
	}) {
		return all, nil
	}
	f.verdict = unfinished
	return f, nil
}

func examineTable(file *os.File, dev device, f found) (found, error) {
	table, err := readTable(file, dev)
	if err == nil {
		f.table = table
		if n := layoutOf(table); n > boot.Layout {
			return examineNewer(file, dev, f, n)
		}
		if isOurs(table) {
			f.verdict = ours
			return f, nil
		}
		f.verdict = foreign
		f.holds, err = describeTable(file, dev, table)
		return f, err
	}
	mbr, err := read(file, 0, 512)
	if err != nil {
		return f, err
	}
	// A DOS partition table: the signature of a boot sector, and an entry in use. That of type EE begins a GPT.
	if bytes.HasSuffix(mbr, []byte{0x55, 0xaa}) && len(bytes.TrimLeft(mbr[446:510], "\x00")) > 0 {
		f.verdict, f.holds = foreign, dosTable
		if mbr[450] == 0xee {
			f.holds = "a damaged GPT partition table"
		}
		return f, nil
	}
	for _, at := range []int64{0, dev.Size - edge} {
		zero, err := blank(file, at, edge)
		if err != nil {
			return f, err
		}
		if !zero {
			f.verdict, f.holds = foreign, "unknown data"
			return f, nil
		}
	}
	return f, nil
}

// readTable reads a GPT. Its library makes room for as many entries as a header names, which may be more than there is memory: so the headers are
// looked at before.
func readTable(file *os.File, dev device) (*gpt.Table, error) {
	const size, most = 128, 1024 // of an entry in bytes, and how many; 128 are usual
	for _, at := range []int64{int64(dev.Sector), dev.Size - int64(dev.Sector)} {
		header, err := read(file, at, 92)
		if err != nil {
			return nil, err
		}
		if entries := header[80:]; binary.LittleEndian.Uint32(entries) > most || binary.LittleEndian.Uint32(entries[4:]) > size {
			if bytes.HasPrefix(header, []byte("EFI PART")) {
				return nil, errors.New("a GPT of an unusual size")
			}
		}
	}
	return gpt.Read(file, dev.Sector, dev.Sector)
}

// layoutOf is the number of the disk's layout; 0 for a disk that has none.
func layoutOf(t *gpt.Table) int {
	for _, p := range t.Partitions {
		if strings.EqualFold(string(p.Type), boot.TypeMeta) {
			return boot.LayoutOf(p.Attributes)
		}
	}
	return 0
}

// examineNewer examines a disk with an unknown layout. Its content isn't needed
// only after a reset, when its volumes are zeros.
func examineNewer(file *os.File, dev device, f found, layout int) (found, error) {
	f.verdict = newer
	f.holds = fmt.Sprintf("a Garboard system of a newer release (disk layout %d; this release knows up to %d)", layout, boot.Layout)
	for _, v := range boot.Volumes {
		if v.FileSystem == "" {
			continue
		}
		p, err := f.partition(dev, v.Label)
		if err != nil {
			return f, nil // that layout has another name for it
		}
		if zero, err := blank(file, p.start, edge); err != nil || !zero {
			return f, err
		}
	}
	f.verdict, f.holds = foreign, fmt.Sprintf("the partitions of a newer Garboard release (disk layout %d), which were reset", layout)
	return f, nil
}

func describe(c content) string {
	switch c.kind {
	case "LUKS", "LVM2", "Linux RAID", "ZFS", "bcache", "Ceph BlueStore", "swap":
		return c.String()
	}
	return strings.Replace(c.String(), c.kind, c.kind+" file system", 1)
}

// isOurs reports whether the table has every partition of its layout with its
// own type, and no other partition but that of an image.
func isOurs(t *gpt.Table) bool {
	n, want := 0, boot.Partitions(layoutOf(t))
	for _, p := range t.Partitions {
		if p.Type == gpt.Unused || isMedium(p) {
			continue
		}
		n++
		if !slices.ContainsFunc(want, func(v boot.Volume) bool {
			return v.Label == p.Name && strings.EqualFold(v.Type, string(p.Type))
		}) {
			return false
		}
	}
	return n == len(want)
}

func isMedium(p *gpt.Partition) bool {
	return p.Name == boot.LabelMedium && strings.EqualFold(string(p.Type), boot.TypeMedium)
}

// describeTable lists the partitions with their content.
func describeTable(file *os.File, dev device, t *gpt.Table) (string, error) {
	var parts []string
	for _, p := range t.Partitions {
		if p.Type == gpt.Unused {
			continue
		}
		size := int64(p.Size)
		c, err := identify(io.NewSectionReader(file, int64(p.Start)*int64(dev.Sector), size), size)
		if err != nil {
			return "", err
		}
		text := fmt.Sprintf("%q", p.Name)
		if c.kind != "" {
			text += " (" + c.String() + ")"
		}
		parts = append(parts, text)
	}
	if len(parts) == 0 {
		return "an empty GPT partition table", nil
	}
	return "partitions " + strings.Join(parts, ", "), nil
}

// data reports whether the disk has partitions of machine.disks, and no others.
func (f found) data() bool {
	return f.table != nil && lastPartition(f.table) != nil && !slices.ContainsFunc(f.table.Partitions, func(p *gpt.Partition) bool {
		return p.Type != gpt.Unused && !strings.EqualFold(string(p.Type), boot.TypeData)
	})
}

// has reports whether the disk has a partition with a GUID.
func (f found) has(guid string) bool {
	return f.table != nil && slices.ContainsFunc(f.table.Partitions, func(p *gpt.Partition) bool {
		return p.Type != gpt.Unused && strings.EqualFold(p.GUID, guid)
	})
}

// partition is one of our partitions on a disk.
type partition struct {
	n     int   // its number
	start int64 // bytes
	size  int64
	guid  string
	path  string // of its device node, if the kernel was asked
}

func (f found) partition(dev device, label string) (partition, error) {
	if f.table == nil {
		return partition{}, errors.New("no partition table")
	}
	for _, p := range f.table.Partitions {
		if p.Type != gpt.Unused && p.Name == label {
			return partition{n: p.Index, start: int64(p.Start) * int64(dev.Sector), size: int64(p.Size), guid: p.GUID}, nil
		}
	}
	return partition{}, fmt.Errorf("no partition %s on %s", label, dev.Path)
}

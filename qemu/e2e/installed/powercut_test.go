//go:build e2e && long

package installed

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/bootloader"
)

// powerCuts is at how many points of a test the power of its machine is cut.
const powerCuts = 60

// A write to the disk, or what else the log has.
type write struct {
	at, size int64
	flush    bool // what was written before is on the disk
	discard  bool
	log      *os.File
	from     int64 // of the data in the log
}

const (
	logSector = 512 // of the log, and the unit of its fields
	logMagic  = 0x6a736677736872

	flagFlush   = 1
	flagDiscard = 4
)

// writesOf are all writes to a machine's disk that are recorded.
func writesOf(t *testing.T, disk string) (all []write) {
	t.Helper()
	for _, path := range e2etest.RecordedWrites(t, disk) {
		log, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { log.Close() })
		var super struct{ Magic, Version, Entries uint64 }
		if err := binary.Read(log, binary.LittleEndian, &super); err != nil || super.Magic != logMagic {
			continue // it was killed before its first write
		}
		end, err := log.Seek(0, io.SeekEnd)
		if err != nil {
			t.Fatal(err)
		}
		// The number of entries in the file is older than its end.
		for at := int64(logSector); at+logSector <= end; {
			var e struct{ Sector, Sectors, Flags, Length uint64 }
			if err := binary.Read(io.NewSectionReader(log, at, logSector), binary.LittleEndian, &e); err != nil {
				t.Fatal(err)
			}
			at += logSector
			w := write{at: int64(e.Sector) * logSector, size: int64(e.Sectors) * logSector, flush: e.Flags&flagFlush != 0, discard: e.Flags&flagDiscard != 0, log: log, from: at}
			if !w.discard {
				at += w.size
			}
			if w == (write{log: log, from: at}) || at > end {
				break // the log goes no further
			}
			all = append(all, w)
		}
		all = append(all, write{flush: true}) // a restart isn't a power cut
	}
	return all
}

// apply makes a write, or its first bytes only, and returns what undoes it.
func (w write) apply(t *testing.T, disk *os.File, most int64) (undo func()) {
	t.Helper()
	before, data := make([]byte, most), make([]byte, most)
	if _, err := disk.ReadAt(before, w.at); err != nil {
		t.Fatal(err)
	}
	if !w.discard {
		if _, err := w.log.ReadAt(data, w.from); err != nil {
			t.Fatal(err)
		}
	}
	put := func(data []byte) {
		if _, err := disk.WriteAt(data, w.at); err != nil {
			t.Fatal(err)
		}
	}
	put(data)
	return func() { put(before) }
}

// bootDisk is the part of a machine's disk that it boots from.
type bootDisk struct {
	*os.File
	efi     boot.Place
	systems map[string]string // version by SHA-256
	loader  []byte            // systemd-boot
	hashes  map[string]string // of the files of systems in one start: both firmwares mostly start the same one
}

// start is what a boot loader would start: the version of a whole system, or "" if nothing starts from this disk.
func (d bootDisk) start(t *testing.T) (uefi, bios string, err error) {
	t.Helper()
	record := make([]byte, logSector)
	if _, err := d.ReadAt(record, 0); err != nil {
		t.Fatal(err)
	}
	d.oneTable(t)
	d.hashes = map[string]string{}
	files, err := fat32.Read(file.New(d.File, true), d.efi.Size, d.efi.Start, logSector)
	if err != nil {
		return "", "", err
	}
	var errs []error
	if loader, e := fs.ReadFile(files, "EFI/BOOT/BOOTX64.EFI"); e == nil {
		if !bytes.Equal(loader, d.loader) {
			errs = append(errs, fmt.Errorf("the boot loader, of %d bytes, isn't whole", len(loader)))
		}
		uefi, e = d.starts(bootloader.SystemdBoot, files)
		errs = append(errs, e)
	}
	if strings.Contains(string(record), "GRUB") { // a partition table may have a record of its own
		var e error
		bios, e = d.starts(bootloader.GRUB, files)
		errs = append(errs, e)
	}
	return uefi, bios, errors.Join(errs...)
}

// oneTable makes the second file allocation table a copy of the first, which is the one that boot loaders read: the
// library refuses tables that differ, as they do when the power fails between the two.
func (d bootDisk) oneTable(t *testing.T) {
	t.Helper()
	sector := make([]byte, logSector)
	if _, err := d.ReadAt(sector, d.efi.Start); err != nil {
		t.Fatal(err)
	}
	first := int64(binary.LittleEndian.Uint16(sector[14:])) * logSector // after the reserved sectors
	table := make([]byte, int64(binary.LittleEndian.Uint32(sector[36:]))*logSector)
	if sector[16] != 2 || int64(len(table)) > d.efi.Size {
		return // there is no file system
	}
	if _, err := d.ReadAt(table, d.efi.Start+first); err != nil {
		t.Fatal(err)
	}
	if _, err := d.WriteAt(table, d.efi.Start+first+int64(len(table))); err != nil {
		t.Fatal(err)
	}
}

// starts is the version of the system that a boot loader starts; "": it starts none.
func (d bootDisk) starts(loader func(fs.FS) (bootloader.Start, error), files fs.FS) (version string, err error) {
	start, err := loader(files)
	if err != nil || start.System == "" {
		return "", err
	}
	return d.system(files, start.System)
}

// system is the version of a system, if the file is whole.
func (d bootDisk) system(files fs.FS, name string) (string, error) {
	if d.hashes[name] == "" {
		content, err := fs.ReadFile(files, name)
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		d.hashes[name] = fmt.Sprintf("%x", sha256.Sum256(content))
	}
	version, known := d.systems[d.hashes[name]]
	if !known {
		return "", fmt.Errorf("%s isn't whole", name)
	}
	return version, nil
}

// powerIsCut cuts the power of a machine at many points of its life. From the disk, each firmware starts a whole
// system. While the machine is installed, it may start none. The disk has all writes up to the point. Before them, it
// had the content of base; "": it was empty.
//
// A lossy disk has a cache: what the machine hadn't flushed is lost, or is there, or is there in part. FAT has no
// journal, and for one file that is replaced there is a moment at which such a disk may have neither the old nor the
// new one. So that is measured only.
func powerIsCut(t *testing.T, lossy bool, base string, all []write, systems map[string]string, loader []byte, capacity int64) {
	t.Helper()
	places := boot.Places(capacity)
	i := slices.IndexFunc(places, func(p boot.Place) bool { return p.Label == boot.LabelState })
	image := partOf(t, base, boot.Place{Size: places[i].Start}, capacity)
	defer image.Close()
	// The data of STATE and EPHEMERAL is of no use to a boot loader.
	all = slices.DeleteFunc(slices.Clone(all), func(w write) bool { return !w.flush && w.at >= places[i].Start })
	for j := range all {
		all[j].size = min(all[j].size, max(0, places[i].Start-all[j].at))
	}
	d := bootDisk{File: image, efi: places[0], systems: systems, loader: loader}
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	points := somePoints(t, random, all)
	t.Logf("%d writes and flushes before STATE, seed %d", len(all), seed)
	kept, seen, counts := 0, "", map[string]int{}
	if base != "" {
		uefi, bios, err := d.start(t)
		if err != nil || uefi == "" || bios != uefi {
			t.Fatalf("before the first write, UEFI starts %q, and BIOS %q: %v", uefi, bios, err)
		}
		seen = uefi
	}
	for _, point := range points {
		last := kept // the last flush
		for j := kept; j < point; j++ {
			if all[j].flush {
				last = j + 1
			}
		}
		for _, w := range all[kept:last] {
			if w.size > 0 { // else it is only a flush
				w.apply(t, image, w.size)
			}
		}
		kept = last
		var undo []func()
		for _, w := range all[kept:point] {
			some := w.size
			if lossy {
				some = random.Int64N(3*w.size/logSector+1) * logSector
			}
			if w.size > 0 && some > 0 {
				undo = append(undo, w.apply(t, image, min(some, w.size)))
			}
		}
		uefi, bios, err := d.start(t)
		slices.Reverse(undo)
		for _, f := range undo {
			f()
		}
		counts[fmt.Sprintf("UEFI %s, BIOS %s", uefi, bios)]++
		if seen == "" && uefi == "" && bios == "" { // it isn't installed yet
			continue
		}
		if err != nil || (uefi == "" || bios == "") && seen != "" {
			report := t.Errorf
			if lossy {
				report = t.Logf
			}
			report("write %d of %d, seed %d: UEFI starts %q, and BIOS %q: %v", point, len(all), seed, uefi, bios, err)
		}
		if uefi != "" && bios != "" {
			seen = uefi
		}
	}
	t.Logf("lossy disk: %v; the power was cut %d times; what started then: %v", lossy, len(points), counts)
}

// somePoints are those at which the power is cut, each after a write that isn't only a flush.
func somePoints(t *testing.T, random *rand.Rand, all []write) []int {
	t.Helper()
	var real []int
	for j, w := range all {
		if w.size > 0 {
			real = append(real, j)
		}
	}
	if len(real) == 0 {
		t.Fatal("nothing was written before STATE")
	}
	points := make([]int, powerCuts)
	for j := range points {
		points[j] = real[random.IntN(len(real))] + 1
	}
	slices.Sort(points)
	return points
}

// partOf is a file of this size that begins with a part of a disk; "": there is no disk.
func partOf(t *testing.T, disk string, part boot.Place, size int64) *os.File {
	t.Helper()
	image, err := os.Create(filepath.Join(t.TempDir(), "part"))
	if err != nil {
		t.Fatal(err)
	}
	if err := image.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if disk == "" {
		return image
	}
	from, err := os.Open(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	block, zeros := make([]byte, 1<<20), make([]byte, 1<<20)
	for at := int64(0); at < part.Size; at += int64(len(block)) {
		block = block[:min(int64(len(block)), part.Size-at)]
		if _, err := from.ReadAt(block, part.Start+at); err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(block, zeros[:len(block)]) {
			continue // a hole, for the copies that are made of it
		}
		if _, err := image.WriteAt(block, at); err != nil {
			t.Fatal(err)
		}
	}
	return image
}

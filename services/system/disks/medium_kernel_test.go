//go:build kernel

package disks

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// firmwareNames makes the firmware of a machine say that it was started from a partition.
func (m *machineUnderTest) firmwareNames(guid string) {
	m.t.Helper()
	m.disks.Firmware = m.t.TempDir()
	value := []byte("\x06\x00\x00\x00")
	for _, c := range guid + "\x00" {
		value = append(value, byte(c), 0)
	}
	if err := os.WriteFile(filepath.Join(m.disks.Firmware, "LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"), value, 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// finds makes a machine find a system for UEFI on one device, and none elsewhere.
func (m *machineUnderTest) finds(device string) {
	m.t.Helper()
	dir := m.t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "EFI/BOOT"), 0o700), os.WriteFile(filepath.Join(dir, "EFI/BOOT/BOOTX64.EFI"), uki.Image(m.t, "v1", "quiet"), 0o600)); err != nil {
		m.t.Fatal(err)
	}
	m.disks.Mount = func(path, _ string, use func(dir string) error) error {
		if path != device {
			return errors.New("no FAT")
		}
		return use(dir)
	}
}

// putFAT is what the node sees of a FAT32.
func (l *loop) putFAT(at int64, label string) {
	l.t.Helper()
	l.WriteAt(at+82, "FAT32   ")
	l.WriteAt(at+71, (label + strings.Repeat(" ", 11))[:11])
}

// stickGUID is that of the partition of stick.
const stickGUID = "0A1B2C3D-89AB-4DEF-8123-456789ABCDEF"

// stick has a GPT with a FAT.
func stick(t *testing.T, l *loop) {
	t.Helper()
	putTable(t, l, table(&gpt.Partition{Index: 1, Name: "stick", Type: gpt.EFISystemPartition, GUID: stickGUID, Start: 2048, End: 1 << 20}))
	l.putFAT(mib, "MINE")
}

// dosStick has a DOS partition table with a FAT, which UEFI doesn't name.
func dosStick(t *testing.T, l *loop) {
	t.Helper()
	entry := make([]byte, 16)
	entry[4] = 0x0c // FAT32
	binary.LittleEndian.PutUint32(entry[8:], 2048)
	binary.LittleEndian.PutUint32(entry[12:], 1<<20)
	l.WriteAt(446, string(entry))
	l.WriteAt(510, "\x55\xaa")
	l.putFAT(mib, "MINE")
	loopdisk.Run(t, "blockdev", "--rereadpt", l.Path)
}

// What machines are started from is never erased, even with wipe, and a selector doesn't choose it.
func TestInstallationMediumIsNeverWiped(t *testing.T) {
	for name, c := range map[string]struct {
		put   func(t *testing.T, l *loop)
		start func(m *machineUnderTest, l *loop)
		want  string
	}{
		"an ISO image": {func(_ *testing.T, l *loop) {
			l.WriteAt(32769, "CD001")
			l.WriteAt(32808, "OTHER"+strings.Repeat(" ", 27))
		},
			func(*machineUnderTest, *loop) {}, `is an installation medium (iso9660 file system "OTHER")`},
		"a FAT with the name of a medium": {func(_ *testing.T, l *loop) { l.putFAT(0, "METAL-ISO") },
			func(*machineUnderTest, *loop) {}, `is an installation medium (vfat file system "METAL-ISO")`},
		"the partition that UEFI names": {stick, func(m *machineUnderTest, _ *loop) { m.firmwareNames(strings.ToLower(stickGUID)) },
			`is the disk that this machine was started from (partitions "stick" (vfat "MINE"))`},
		"a system in a FAT without a GPT": {dosStick, func(m *machineUnderTest, l *loop) { m.finds(l.Path + "p1") },
			"is an installation medium (a DOS partition table)"},
	} {
		t.Run(name, func(t *testing.T) {
			l, other := newLoop(t, 4*gib), newLoop(t, 4*gib)
			c.put(t, l)
			before := l.Edges()
			m := bootMachine(t, l)
			c.start(m, l)
			refused(t, m.up(config.Install{Disk: l.Path, Wipe: true}), "disk "+l.Path+" "+c.want+". Name another disk in machine.install.disk. The disks here:")

			m = bootMachine(t, l, other)
			c.start(m, l)
			m.mustUp(config.Install{DiskSelector: config.DiskSelector{Size: config.DiskSize{Comparison: "==", Bytes: 4 * gib}}, Wipe: true})
			if m.disks.System().Path != other.Path {
				t.Errorf("the system is on %s", m.disks.System().Path)
			}
			_, err := m.disks.UserDisks([]string{l.Path})
			refused(t, err, c.want)
			why, _, _ := strings.Cut(c.want, " (")
			if unfit := m.disks.Unfit(l.device(), "", config.DiskSelector{}); unfit != why { // of machine.disks, too
				t.Errorf("it isn't selected, because it %s", unfit)
			}
			if string(before) != string(l.Edges()) {
				t.Error("the medium was written to")
			}
		})
	}
}

// A stick that machines aren't started from is erased with wipe.
func TestOtherSticksAreWiped(t *testing.T) {
	for name, put := range map[string]func(*testing.T, *loop){"GPT": stick, "DOS": dosStick} {
		t.Run(name, func(t *testing.T) {
			l := newLoop(t, 4*gib)
			put(t, l)
			m := bootMachine(t, l)
			m.firmwareNames("FFFFFFFF-89AB-4DEF-8123-456789ABCDEF")
			m.finds("/dev/another")
			m.mustUp(config.Install{Disk: l.Path, Wipe: true})
		})
	}
}

// A disk with the partition of an image is the system's, EPHEMERAL grows, and the partition is a medium, also after a
// reset. A volume of another disk with the same label is none.
func TestDiskFromAnImageHasAMedium(t *testing.T) {
	l, other, third := newLoop(t, 4*gib), newLoop(t, 4<<20), newLoop(t, 4<<20)
	dev := l.device()
	all := boot.Places(boot.MinDisk)
	last := len(all) - 1
	start := all[last].Start
	all = slices.Insert(all, last, boot.Place{Volume: boot.Volume{Label: boot.LabelMedium, Type: boot.TypeMedium}, Start: start, Size: mib})
	all[last+1].Start += mib
	dev = putTable(t, l, dev.NewTable(all))
	for disk, at := range map[*loop]int64{l: start, other: 0, third: 0} {
		disk.WriteAt(at+32769, "CD001")
		disk.WriteAt(at+32808, "GARBOARD"+strings.Repeat(" ", 24))
	}
	media := func(m *machineUnderTest) (used []string) {
		t.Helper()
		m.disks.Mount = func(path, kind string, _ func(dir string) error) error {
			used = append(used, path+" "+kind)
			return boot.ErrNone
		}
		if err := m.disks.Media(t.Context(), boot.MediumLabel, func(fs.FS) error { return nil }); !errors.Is(err, boot.ErrNone) {
			t.Error(err)
		}
		return used
	}
	p, err := dev.Device(boot.LabelMedium)
	if err != nil {
		t.Fatal(err)
	}
	path := p.Path
	want := []string{path + " iso9660"}
	m := bootMachine(t, l, other, third)
	if used := media(m); len(used) > 0 {
		t.Errorf("before the system disk is known, media are %q", used)
	}
	volume := func(has ...string) (used []string, err error) {
		m.disks.Mount = func(device, _ string, _ func(dir string) error) error {
			if !slices.Contains(has, device) {
				return boot.ErrNone
			}
			used = append(used, device)
			return nil
		}
		err = m.disks.Volume(t.Context(), boot.MediumLabel, func(fs.FS) error { return nil })
		return used, err
	}
	if used, err := volume(other.Path); err != nil || !slices.Equal(used, []string{other.Path}) {
		t.Errorf("a configuration on one disk: %q, %v", used, err)
	}
	if _, err := volume(third.Path, other.Path); err == nil || !strings.Contains(err.Error(), "detach all but one") {
		t.Errorf("a configuration on two disks: %v", err)
	}
	if _, err := volume(); !errors.Is(err, boot.ErrNone) {
		t.Errorf("no configuration: %v", err)
	}
	m.mustUp(config.Install{Disk: l.Path})
	if used, err := volume(path, other.Path); err != nil || !slices.Equal(used, []string{path}) {
		t.Errorf("a configuration on the system's medium, and on another disk: %q, %v", used, err)
	}
	if m.size() < boot.MinDisk {
		t.Errorf("EPHEMERAL has %s of a disk of 4 GiB", disk.SizeText(m.size()))
	}
	if used := media(m); !slices.Equal(used, want) {
		t.Errorf("media are %q, want %q", used, want)
	}
	if err := m.disks.MarkWipe(boot.WipeLabels, nil, ""); err != nil {
		t.Fatal(err)
	}
	m.off()
	if err := m.disks.Erase(t.Context()); err != nil {
		t.Fatal(err)
	}
	m = bootMachine(t, l, other)
	m.mustUp(config.Install{Disk: l.Path})
	if used := media(m); !slices.Equal(used, want) {
		t.Errorf("after a reset, media are %q, want %q", used, want)
	}
}

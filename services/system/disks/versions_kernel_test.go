//go:build kernel

package disks

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
)

// ofLayout gives the disk another layout: with that number, and the change.
func (l *loop) ofLayout(number uint64, change func(t *gpt.Table)) {
	l.t.Helper()
	f := l.device()
	if f.Table == nil {
		l.t.Fatalf("%+v", f)
	}
	for _, p := range f.Table.Partitions {
		if string(p.Type) == boot.TypeMeta {
			p.Attributes = number << 48
		}
	}
	if change != nil {
		change(f.Table)
	}
	putTable(l.t, l, f.Table)
}

// installed is a disk with a system, and some data on each volume.
func installed(t *testing.T) *loop {
	t.Helper()
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	m.write("state/mine", "kept")
	m.write("var/mine", "kept too")
	m.off()
	return l
}

func (m *machineUnderTest) mustHaveKept() {
	m.t.Helper()
	if got := m.read("state/mine") + ", " + m.read("var/mine"); got != "kept, kept too" {
		m.t.Errorf("the volumes have %q", got)
	}
}

// Disks of layout 1, and of releases that wrote no number, are used without changes.
func TestDiskOfTheLayoutBefore(t *testing.T) {
	for number := range uint64(2) {
		l := installed(t)
		l.ofLayout(number, func(t *gpt.Table) {
			a := t.Partitions[1]
			b := *a
			a.Name, a.Type, a.End = "BOOT-A", "104570E5-C21B-4715-828D-698D47D3D15B", a.Start+1023
			b.Name, b.Type, b.Start, b.Index = "BOOT-B", "FC30169E-53FE-4BF8-8144-7F73C561361A", a.End+1, 6
			a.Size, b.Size = 0, 0
			t.Partitions = append(t.Partitions, &b)
		})
		m := bootMachine(t, l)
		if found, err := m.mountState(); !found || err != nil {
			t.Fatalf("STATE: %v, %v", found, err)
		}
		m.mustUp(config.Install{Disk: l.Path})
		m.mustHaveKept()
		if system, err := m.disks.SystemDisk(); err != nil || system.BIOS.Label != "BOOT-A" {
			t.Errorf("%+v, %v", system, err)
		}
		m.off()
	}
}

const tooNew = "holds a Garboard system of a newer release (disk layout 3; this release knows up to 2), and isn't touched. " +
	"Boot that release. To use the disk with this one, reset the node with that release first (gbctl reset), and set machine.install.wipe: true"

// A disk of a newer release is never used, whatever the configuration says, and
// that release has all its data when it boots again.
func TestDiskOfANewerLayout(t *testing.T) {
	for name, change := range map[string]func(t *gpt.Table){
		"the same partitions": nil,
		"other partitions": func(t *gpt.Table) {
			t.Partitions[1].Name, t.Partitions[1].Type = "SLOTS", linuxData
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := installed(t)
			l.ofLayout(3, change)
			before := l.Edges()
			m := bootMachine(t, l)
			if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), tooNew) {
				t.Errorf("STATE: %v, %v", found, err)
			}
			for _, wipe := range []bool{false, true} {
				refused(t, bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: wipe}), "disk "+l.Path+" "+tooNew, "The disks here:\nDEVICE")
			}
			if !bytes.Equal(before, l.Edges()) {
				t.Error("the disk was written to")
			}
			l.ofLayout(2, func(t *gpt.Table) { t.Partitions[1].Name, t.Partitions[1].Type = boot.LabelBIOS, boot.TypeBIOS })
			again := bootMachine(t, l)
			again.mustUp(config.Install{Disk: l.Path})
			again.mustHaveKept()
		})
	}
}

// A step of a newer release can be neither continued nor undone.
func TestJournalOfANewerRelease(t *testing.T) {
	for _, journal := range []string{"garboard journal 2: ", "garboard journal 1: decrypt STATE\n"} {
		l := installed(t)
		l.WriteAt(1<<20-4096, journal)
		if found, err := bootMachine(t, l).mountState(); found || err == nil || !strings.Contains(err.Error(), "a newer release was changing") {
			t.Errorf("STATE: %v, %v", found, err)
		}
		refused(t, bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: true}), "holds a Garboard system that a newer release was changing, and isn't touched. Boot that release")
		l.WriteAt(1<<20-4096, strings.Repeat("\x00", len(journal)))
		m := bootMachine(t, l)
		m.mustUp(config.Install{Disk: l.Path})
		m.mustHaveKept()
	}
}

// The way back to an older release: a reset by the newer one, and wipe: true.
func TestDiskOfANewerLayoutAfterItsReset(t *testing.T) {
	l := installed(t)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	if err := m.disks.MarkWipe(boot.WipeLabels, nil, ""); err != nil {
		t.Fatal(err)
	}
	m.off()
	if err := m.disks.Erase(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.ofLayout(3, nil)
	refused(t, bootMachine(t, l).up(config.Install{Disk: l.Path}), "holds the partitions of a newer Garboard release (disk layout 3), which were reset, and isn't touched", "machine.install.wipe: true")
	m = bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path, Wipe: true})
	m.write("state/mine", "anew")
	m.off()
	m = bootMachine(t, l)
	if found, err := m.mountState(); !found || err != nil || m.read("state/mine") != "anew" {
		t.Errorf("the boot after: %v, %v", found, err)
	}
	if n := l.device().Layout(); n != boot.Layout {
		t.Errorf("the disk has layout %d", n)
	}
}

// A machine doesn't choose the older of two systems, and an interrupted reset
// doesn't wipe a newer one.
func TestNewerLayoutBesideOurs(t *testing.T) {
	l, user := installed(t), installed(t)
	user.ofLayout(3, nil)
	found, err := bootMachine(t, l, user).mountState()
	if found || err == nil || !strings.Contains(err.Error(), "both hold a Garboard system") {
		t.Errorf("%v, %v", found, err)
	}
	m := bootMachine(t, l, user).numbered()
	dev := user.device()
	dev.Serial = m.disks.Keeper.Disks.Serial(user.Name)
	l.Change(func(file *os.File) error {
		return disk.WriteJournal(file, disk.Journal{Step: disk.StepWipe, Label: boot.LabelEphemeral, Disks: marks([]UserDisk{dev.Identity})})
	})
	m.disks.o.Installed = true
	if state, err := m.disks.MountState(t.Context()); state != configuration.StateBroken || strings.Contains(m.console.String(), "wiping") {
		t.Errorf("of two systems, one was wiped: %v, console: %s", err, m.console)
	}
	user.ofLayout(2, nil)
	m = bootMachine(t, user)
	m.mustUp(config.Install{Disk: user.Path})
	m.mustHaveKept()
}

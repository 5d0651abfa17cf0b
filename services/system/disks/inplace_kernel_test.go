//go:build kernel

package disks

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
)

// marksEncrypt writes the journal, as somebody with the disk might.
func (m *machineUnderTest) marksEncrypt(l *loop) {
	m.t.Helper()
	f, err := disk.At(l.Path)
	if err == nil {
		err = f.Change(func(file *os.File) error {
			return disk.WriteJournal(file, disk.Journal{Step: disk.StepEncrypt, Label: boot.LabelState})
		})
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

// hasEFI makes the file system of the EFI partition: mkfs.fat isn't on every machine that runs this test.
func hasEFI(t *testing.T, l *loop) {
	t.Helper()
	f, err := os.OpenFile(partition(t, l, boot.LabelEFI), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = fat32.Create(file.New(f, false), size, 0, 512, boot.LabelEFI, true)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// STATE is encrypted with what is on it, whenever the power goes, and the disk has nothing of it in the clear then.
func TestEncryptInPlace(t *testing.T) {
	l := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: l.Path}
	keys := config.SystemDiskEncryption{State: sealed(nodeIDKey(), staticKey())}
	m := bootMachine(t, l)
	m.comesUp(install, config.SystemDiskEncryption{})
	hasEFI(t, l)
	if err := m.disks.MarkEncrypt(); err == nil || !strings.Contains(err.Error(), "with a nodeID or static key") {
		t.Errorf("without keys: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(m.dir, "state/a/b"), 0o710); err != nil {
		t.Fatal(err)
	}
	m.write("state/a/b/mark", hidden)
	if err := errors.Join(os.Chmod(filepath.Join(m.dir, "state/a/b/mark"), 0o640), os.Chown(filepath.Join(m.dir, "state/a/b/mark"), 0, 61)); err != nil {
		t.Fatal(err)
	}
	m.off()

	m = bootMachine(t, l)
	if shown := m.comesUp(install, keys); !shown[boot.LabelState].Unlike {
		t.Errorf("%+v", shown)
	}
	if err := m.disks.MarkEncrypt(); err != nil {
		t.Fatal(err)
	}
	m.off()
	for _, cut := range []string{"encrypt", "format STATE", "fill", "encrypted"} {
		m = bootMachine(t, l)
		m.cut = cut
		if state, err := m.disks.MountState(t.Context()); state != configuration.StateBroken || !errors.Is(err, errPowerCut) {
			t.Errorf("cut before %s: %v, %v\n%s", cut, state, err, m.console)
		}
		m.off()
	}
	// The last power cut came before the journal was clean, and the next one is that of a disk which is encrypted.
	for range 2 {
		m = bootMachine(t, l)
		if found, err := m.mountState(); !found || err != nil {
			t.Fatalf("%v, %v", found, err)
		}
		info, err := os.Stat(filepath.Join(m.dir, "state/a/b/mark"))
		if err != nil || m.read("state/a/b/mark") != hidden || info.Mode() != 0o640 {
			t.Errorf("the file is %v, %v", info, err)
		}
		if shown := m.comesUp(install, keys)[boot.LabelState]; shown.Layers != "LUKS2 (0 nodeID, 3 static), xfs" || shown.Problem != "" {
			t.Errorf("%+v", shown)
		}
		if got := m.slotsOf(l, boot.LabelState); !slices.Equal(got, []int{0, 3}) {
			t.Errorf("slots %v", got)
		}
		m.off()
		if l.Holds(hidden) {
			t.Error("the disk has what was on STATE in the clear")
		}
		m.marksEncrypt(l)
	}
}

// What can't be kept stays as it is.
func TestEncryptInPlaceGivesUp(t *testing.T) {
	l := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: l.Path}
	m := bootMachine(t, l)
	m.comesUp(install, config.SystemDiskEncryption{})
	hasEFI(t, l)
	m.write("state/mark", hidden)
	if err := os.WriteFile(filepath.Join(m.dir, "state/large"), make([]byte, maxKept+1), 0o600); err != nil {
		t.Fatal(err)
	}
	m.off()
	m.marksEncrypt(l)
	for range 2 {
		m = bootMachine(t, l)
		if found, err := m.mountState(); !found || err != nil || m.read("state/mark") != hidden {
			t.Fatalf("%v, %v", found, err)
		}
		m.off()
	}
	if f, err := disk.At(l.Path); err != nil || f.Pending.Step != "" {
		t.Errorf("%+v, %v", f.Pending, err)
	}
}

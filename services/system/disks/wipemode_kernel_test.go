//go:build kernel

package disks

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
)

// bytesOf is a part of a volume, from an offset on.
func (m *machineUnderTest) bytesOf(l *loop, label string, at, size int64) []byte {
	m.t.Helper()
	p := l.partition(label)
	got := make([]byte, size)
	l.Change(func(dev *os.File) error {
		_, err := io.ReadFull(io.NewSectionReader(dev, p.Start+at, size), got)
		return err
	})
	return got
}

func zeros(data []byte) bool { return len(bytes.TrimLeft(data, "\x00")) == 0 }

// With each mode, the key slots go first. keys leaves the rest of what is encrypted, and overwrite nothing, also if the
// next boot does it.
func TestWipeModes(t *testing.T) {
	const far = 64 << 20 // behind the key slots
	l := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: l.Path}
	keys := config.SystemDiskEncryption{Ephemeral: sealed(staticKey())}
	m := bootMachine(t, l)
	m.comesUp(install, keys)
	remarks, err := m.disks.Wiping(boot.WipeKeys, boot.WipeLabels, nil)
	if text := strings.Join(remarks, "\n"); err != nil || !strings.Contains(text, "STATE is wiped as without --wipe-mode") || strings.Contains(text, "EPHEMERAL") {
		t.Errorf("%q, %v", remarks, err)
	}
	if _, err := m.disks.Wiping(boot.WipeDiscard, boot.WipeLabels, nil); (err == nil) != m.disks.System().Discards() {
		t.Errorf("discards: %v, %v", m.disks.System().Discards(), err)
	}
	if err := m.disks.MarkWipe([]string{boot.LabelEphemeral}, nil, boot.WipeKeys); err != nil {
		t.Fatal(err)
	}
	m.off()
	l.Change(func(dev *os.File) error {
		_, err := dev.WriteAt([]byte("ciphertext"), l.partition(boot.LabelEphemeral).Start+far)
		return err
	})
	if err := m.disks.Erase(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !zeros(m.bytesOf(l, boot.LabelEphemeral, 0, 16<<20)) || string(m.bytesOf(l, boot.LabelEphemeral, far, 10)) != "ciphertext" {
		t.Error("keys: more or less than the key slots is gone")
	}

	// The power goes before it is overwritten.
	m = bootMachine(t, l)
	m.comesUp(install, keys)
	if err := m.disks.MarkWipe([]string{boot.LabelState}, nil, boot.WipeOverwrite); err != nil || m.disks.EraseTime() <= 0 {
		t.Fatal(err, m.disks.EraseTime())
	}
	m.off()
	state := l.partition(boot.LabelState)
	l.Change(func(dev *os.File) error {
		_, err := dev.WriteAt([]byte("data"), state.Start+far)
		return err
	})
	m.cut = "wipe STATE"
	if err := m.disks.Erase(t.Context()); !errors.Is(err, errPowerCut) {
		t.Fatal(err)
	}
	m = bootMachine(t, l)
	m.disks.o.Installed = true
	if found, err := m.mountState(); found || err != nil {
		t.Fatalf("STATE is found: %v, %v", found, err)
	}
	if !zeros(m.bytesOf(l, boot.LabelState, 0, state.Size)) {
		t.Error("STATE isn't overwritten")
	}
}

// All that is encrypted on a user's disk loses its key slots, in any mode.
func TestKeySlotsOfAUsersDisk(t *testing.T) {
	l := theirs(t)
	d, err := disk.At(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	at := d.Partitions()[0].Start
	l.WriteAt(at, "LUKS\xba\xbe")
	l.WriteAt(at+12<<20, "a key slot")
	m := bootMachine(t, l)
	if err := m.disks.wipeUserDisk(t.Context(), d, boot.WipeKeys); err != nil {
		t.Fatal(err)
	}
	if l.Holds("a key slot") || !l.kept() {
		t.Error("keys: more or less than the key slots is gone")
	}
}

func TestWipeModeInAContainer(t *testing.T) {
	m := bootMachine(t)
	m.disks.o.Mode = boot.Container
	if _, err := m.disks.Wiping(boot.WipeKeys, boot.WipeLabels, nil); err == nil || !strings.Contains(err.Error(), "no disks of its own") {
		t.Error(err)
	}
}

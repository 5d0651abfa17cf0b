//go:build kernel

package disks

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
	"golang.org/x/sys/unix"
)

func refused(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("the disk was taken")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error is\n%s\nwant in it: %s", err, part)
		}
	}
}

func TestTooSmallDisk(t *testing.T) {
	l := newLoop(t, 2*gib)
	before := l.Edges()
	err := bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: true})
	refused(t, err, "disk "+l.Path+" is too small: 2 GiB of at least 3 GiB. Name another disk in machine.install.disk. The disks here:\nDEVICE")
	if string(before) != string(l.Edges()) {
		t.Error("the disk was written to")
	}
}

func TestDiskInUseIsNeverWiped(t *testing.T) {
	l := newLoop(t, 4*gib)
	loopdisk.Run(t, "mkfs.ext4", "-q", l.Path)
	dir := t.TempDir()
	if err := unix.Mount(l.Path, dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, 0) })
	err := bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: true})
	refused(t, err, "is in use: "+l.Name+" is mounted on "+dir)
}

func TestReadOnlyDisk(t *testing.T) {
	l := newLoop(t, 4*gib)
	loopdisk.Run(t, "mkfs.ext4", "-q", l.Path)
	loopdisk.Run(t, "blockdev", "--setro", l.Path)
	t.Cleanup(func() { loopdisk.Run(t, "blockdev", "--setrw", l.Path) }) // the setting would stay
	refused(t, bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: true}), "is read-only")
}

// An installed machine whose STATE can't be read is given no other configuration.
func TestDamagedState(t *testing.T) {
	l := installed(t)
	l.overwrite(t, boot.LabelState, 0, bytes.Repeat([]byte("?"), disk.Edge))
	for _, is := range []bool{true, false} {
		m := bootMachine(t, l)
		m.disks.o.Installed = is
		if state, err := m.disks.MountState(t.Context()); state != configuration.StateBroken || err == nil {
			t.Errorf("installed %v: %v, %v", is, state, err)
		}
	}
}

// A machine doesn't choose between disks of two clusters.
func TestTwoSystemDisks(t *testing.T) {
	a, b := newLoop(t, 4*gib), newLoop(t, 4*gib)
	for _, l := range []*loop{a, b} {
		m := bootMachine(t, l)
		m.mustUp(config.Install{Disk: l.Path})
		m.off()
	}
	own := bootMachine(t, a, b)
	for _, installed := range []bool{false, true} {
		own.disks.o.Installed = installed
		state, err := own.disks.MountState(t.Context())
		if state != configuration.StateBroken || err == nil || !strings.Contains(err.Error(), a.Path) || !strings.Contains(err.Error(), b.Path) {
			t.Errorf("installed %v: %v, %v", installed, state, err)
		}
	}

	// The boot loader knows which one this boot is from, and that one is awaited.
	m := bootMachine(t, a, b)
	m.disks.o.Installed = true
	m.firmwareNames(b.partition(boot.LabelEFI).GUID)
	if found, err := m.mountState(); !found || err != nil || m.disks.System().Path != b.Path {
		t.Errorf("found %v, %v, %+v, want %s", found, err, m.disks.System(), b.Path)
	}
	m.off()
	m = bootMachine(t, a)
	m.disks.o.Installed = true
	m.firmwareNames(b.partition(boot.LabelEFI).GUID)
	if state, err := m.disks.MountState(t.Context()); state != configuration.StateLate || err == nil {
		t.Errorf("before the disk of this boot is there: %v, %v", state, err)
	}
}

// A service that runs again finds its disk, whatever the configuration names.
func TestDisksRunAgain(t *testing.T) {
	a, b := newLoop(t, 4*gib), newLoop(t, 4*gib)
	m := bootMachine(t, a, b)
	m.mustUp(config.Install{Disk: a.Path})
	m.write("state/kept", "kept")
	m.off()
	m.mustUp(config.Install{Disk: b.Path})
	if m.read("state/kept") != "kept" || m.disks.System().Path != a.Path {
		t.Errorf("the system is on %s", m.disks.System().Path)
	}
}

// partition is one of ours.
func (l *loop) partition(label string) disk.Partition {
	l.t.Helper()
	p, err := l.device().Partition(label)
	if err != nil {
		l.t.Fatal(err)
	}
	return p
}

// Without a disk the service logs what it waits for, and the console lists the
// disks. A disk that is added later is used.
func TestDiskComesLater(t *testing.T) {
	l := newLoop(t, 4*gib)
	other := newLoop(t, 4*gib)
	m := bootMachine(t, other)
	m.disks.o.patience = 10 * time.Millisecond
	plugged := make(chan struct{})
	m.disks.Keeper.Disks.Is = func(name string) bool {
		select {
		case <-plugged:
			return name == l.Name || name == other.Name
		default:
			return name == other.Name
		}
	}
	up := make(chan error, 1)
	go func() { up <- m.up(config.Install{Disk: l.Path}) }()
	eventually.That(t, 10*time.Second, "the console says what is missing", func() error {
		want := fmt.Sprintf("[garboard] disks: no disk %s since", l.Path)
		if text := m.console.String(); !strings.Contains(text, want) || !strings.Contains(text, other.Path) {
			return fmt.Errorf("console: %q", text)
		}
		return nil
	})
	close(plugged)
	if err := <-up; err != nil {
		t.Fatal(err)
	}
}

func TestNoDiskNamed(t *testing.T) {
	l := newLoop(t, 4*gib)
	refused(t, bootMachine(t, l).up(config.Install{}), "machine.install.disk isn't set", l.Path+"  4 GiB")
}

// A reset zeroes the beginning of EPHEMERAL. It is made again, also after an
// interruption, and STATE stays.
func TestZeroedPartitionIsMadeAgain(t *testing.T) {
	for _, cut := range []string{"none", "format EPHEMERAL", "done"} {
		t.Run(cut, func(t *testing.T) {
			l := newLoop(t, 4*gib)
			m := bootMachine(t, l)
			m.mustUp(config.Install{Disk: l.Path})
			m.write("state/mine", "kept")
			m.write("var/mine", "gone")
			m.off()
			l.overwrite(t, boot.LabelEphemeral, 0, make([]byte, disk.Edge))

			if cut != "none" {
				m = bootMachine(t, l)
				m.cut = cut
				if err := m.up(config.Install{Disk: l.Path}); !errors.Is(err, errPowerCut) {
					t.Fatal(err)
				}
				m.off()
			}
			m = bootMachine(t, l)
			if found, err := m.mountState(); !found || err != nil {
				t.Fatalf("STATE: %v, %v", found, err)
			}
			m.mustUp(config.Install{Disk: l.Path})
			if got := m.read("state/mine"); got != "kept" {
				t.Errorf("STATE has %q", got)
			}
			if _, err := os.Stat(filepath.Join(m.dir, "var/mine")); err == nil {
				t.Error("EPHEMERAL has still what it had")
			}
		})
	}
}

// overwrite writes to one of our partitions.
func (l *loop) overwrite(t *testing.T, label string, at int64, data []byte) {
	t.Helper()
	p := l.partition(label)
	l.Change(func(dev *os.File) error {
		_, err := dev.WriteAt(data, p.Start+at)
		return errors.Join(err, dev.Sync())
	})
}

// Content other than our file system in one of our partitions is kept.
func TestForeignPartitionIsRefused(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	m.off()
	for content, want := range map[string]string{
		"hsqs":         "holds squashfs in its partition EPHEMERAL, where an xfs file system was",
		"LUKS\xba\xbe": "EPHEMERAL is encrypted, and has no keys in machine.systemDiskEncryption",
	} {
		l.overwrite(t, boot.LabelEphemeral, 0, []byte(content))
		m := bootMachine(t, l)
		refused(t, m.up(config.Install{Disk: l.Path, Wipe: true}), want)
		m.off()
	}
}

// The backup of the partition table is enough.
func TestDamagedPrimaryTable(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	m.write("var/mine", "kept")
	m.off()
	l.WriteAt(512, strings.Repeat("\x00", 512))
	m = bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	if got := m.read("var/mine"); got != "kept" {
		t.Errorf("EPHEMERAL has %q", got)
	}
}

// A damaged file system is repaired, and the console shows that.
func TestDamagedFileSystemIsRepaired(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	m.off()
	l.overwrite(t, boot.LabelState, 3*512, make([]byte, 512)) // the free list of the first allocation group (XAGFL)
	l.overwrite(t, boot.LabelState, 1*512, make([]byte, 512)) // its free space (XAGF)
	m = bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	if text := m.console.String(); !strings.Contains(text, "STATE on "+l.Path+"p4 is repaired") {
		t.Errorf("console: %s", text)
	}
}

// A disk appears after a configuration was found elsewhere: the configuration
// on its STATE is used, and isn't overwritten.
func TestStateComesLate(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.hostname = "as-installed"
	m.mustUp(config.Install{Disk: l.Path})
	kept := m.read("state/config.yaml")
	m.off()

	m = bootMachine(t, l)
	m.hostname = "from-the-medium"
	m.mustUp(config.Install{Disk: l.Path}) // without MountState first
	cfg, err := configuration.Config(m.store)
	if err != nil || cfg.Machine.Network.Hostname != "as-installed" {
		t.Errorf("going on with the configuration of %q, %v", cfg.Machine.Network.Hostname, err)
	}
	if got := m.read("state/config.yaml"); got != kept {
		t.Errorf("STATE has another configuration now:\n%s", got)
	}
	if text := m.console.String(); !strings.Contains(text, "STATE came late") {
		t.Errorf("console: %s", text)
	}
}

// An empty disk that fits, too, isn't taken while the disk with the node's system may still appear.
func TestSystemDiskComesLate(t *testing.T) {
	late := newLoop(t, 4*gib)
	m := bootMachine(t, late)
	m.mustUp(config.Install{Disk: late.Path})
	m.off()

	fits := newLoop(t, 4*gib)
	m = bootMachine(t, late, fits)
	began, all := time.Now(), m.disks.Keeper.Disks.Is
	m.disks.Keeper.Disks.Is = func(name string) bool { return all(name) && (name != late.Name || time.Since(began) > time.Second) }
	m.disks.Keeper.Disks.Began = began.Add(3*time.Second - disk.LateDisks)
	m.mustUp(config.Install{DiskSelector: config.DiskSelector{Size: config.DiskSize{Comparison: ">", Bytes: gib}}})
	if got := m.disks.System().Path; got != late.Path {
		t.Errorf("the system is on %s, not on %s", got, late.Path)
	}
	if f := fits.device(); f.Verdict != disk.Empty {
		t.Errorf("the other one has %s", f.Holds)
	}
}

// With a full STATE, the configuration can't be stored, and the error has the place.
func TestFullState(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	fill(t, filepath.Join(m.dir, "state"))
	if err := os.Remove(filepath.Join(m.dir, "state/config.yaml")); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(m.dir, "state"))
	m.off()
	m = bootMachine(t, l)
	err := m.up(config.Install{Disk: l.Path})
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "store the configuration on STATE") {
		t.Errorf("up with a full STATE: %v", err)
	}
}

// fill writes until the disk is full.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.CreateTemp(dir, "fill")
	if errors.Is(err, unix.ENOSPC) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for n := 1 << 20; n > 0; n /= 2 {
		for buf := make([]byte, n); err == nil; {
			_, err = f.Write(buf)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
	for i := 0; err == nil; i++ { // inodes too
		err = os.WriteFile(filepath.Join(dir, fmt.Sprintf("fill%d", i)), []byte("x"), 0o600)
	}
}

// A busy file system is detached after a short time, and its data is on the disk.
func TestBusyAtShutdown(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	f, err := os.Create(filepath.Join(m.dir, "var/busy"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("written late"); err != nil {
		t.Fatal(err)
	}
	m.off()
	if text := m.console.String(); !strings.Contains(text, "device or resource busy; detaching it") {
		t.Errorf("console: %s", text)
	}
	f.Close()
	m = bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	if got := m.read("var/busy"); got != "written late" {
		t.Errorf("after the boot: %q", got)
	}
}

// In a container the service only makes directories.
func TestContainer(t *testing.T) {
	m := bootMachine(t)
	m.disks.o.Mode = boot.Container
	m.disks.o.Processes = process.New()
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("STATE: %v, %v", found, err)
	}
	m.mustUp(config.Install{})
	for _, path := range []string{"state/config.yaml", "var/lib/kubelet", "var/cri/conf.d"} {
		if _, err := os.Stat(filepath.Join(m.dir, path)); err != nil {
			t.Error(err)
		}
	}
}

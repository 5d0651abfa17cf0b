//go:build kernel

package disks

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"golang.org/x/sys/unix"
)

// used is a disk with a system on it, and a secret on each partition.
func used(t *testing.T, l *loop) *machineUnderTest {
	t.Helper()
	m := bootMachine(t, l)
	m.mustUp(config.Install{Disk: l.Path})
	m.write("state/key", "the secret of STATE")
	m.write("var/lib/etcd/key", "the secret of EPHEMERAL")
	unix.Sync()
	if !l.Holds("the secret of STATE") || !l.Holds("the secret of EPHEMERAL") {
		t.Fatal("the secrets aren't on the disk")
	}
	return m
}

// S-180, S-183, S-184: wiped data can't be read from the disk any more, other
// data stays, and the next boot finds no STATE, or makes what is missing.
func TestS183Wipe(t *testing.T) {
	for _, labels := range [][]string{{boot.LabelState, boot.LabelEphemeral}, {boot.LabelState}, {boot.LabelEphemeral}} {
		t.Run(strings.Join(labels, "+"), func(t *testing.T) {
			l := newLoop(t, 4*gib)
			m := used(t, l)
			if err := m.disks.MarkWipe(labels, nil, ""); err != nil {
				t.Fatal(err)
			}
			if !m.disks.Marked() {
				t.Error("nothing is marked")
			}
			if err := m.disks.Erase(t.Context()); err == nil {
				t.Error("it was erased while it was mounted")
			}
			m.off()
			if err := m.disks.Erase(t.Context()); err != nil {
				t.Fatal(err)
			}
			wiped(t, l, labels)
		})
	}
}

func wiped(t *testing.T, l *loop, labels []string) {
	t.Helper()
	state, ephemeral := slices.Contains(labels, boot.LabelState), slices.Contains(labels, boot.LabelEphemeral)
	if l.Holds("the secret of STATE") == state || l.Holds("the secret of EPHEMERAL") == ephemeral {
		t.Errorf("wiping %v: STATE holds its secret: %v; EPHEMERAL: %v", labels, l.Holds("the secret of STATE"), l.Holds("the secret of EPHEMERAL"))
	}
	m := bootMachine(t, l)
	found, err := m.mountState()
	if found == state || err != nil {
		t.Errorf("after wiping %v, STATE is found: %v, %v", labels, found, err)
	}
	m.mustUp(config.Install{Disk: l.Path})
	for file, gone := range map[string]bool{"state/key": state, "var/lib/etcd/key": ephemeral} {
		if _, err := os.Stat(filepath.Join(m.dir, file)); errors.Is(err, fs.ErrNotExist) != gone {
			t.Errorf("after wiping %v: %s: %v", labels, file, err)
		}
	}
	m.off()
	again := bootMachine(t, l) // nothing is wiped twice
	if found, err := again.mountState(); !found || err != nil {
		t.Errorf("the boot after: %v, %v", found, err)
	}
}

// After a reset of STATE, the system stays on the disk that it was started from, although the selector fits another
// one by now.
func TestSystemStaysOnItsDisk(t *testing.T) {
	fits, l := newLoop(t, 4*gib), newLoop(t, 4*gib)
	if fits.Name > l.Name { // the first that fits is chosen
		fits, l = l, fits
	}
	m := used(t, l)
	if err := m.disks.MarkWipe([]string{boot.LabelState}, nil, ""); err != nil {
		t.Fatal(err)
	}
	m.off()
	if err := m.disks.Erase(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := bootMachine(t, fits, l)
	next.disks.o.Installed = true
	next.mustUp(config.Install{DiskSelector: config.DiskSelector{Size: config.DiskSize{Comparison: ">", Bytes: gib}}})
	if got := next.disks.System().Path; got != l.Path {
		t.Errorf("the system is on %s, not on %s", got, l.Path)
	}
}

// After a power cut at any time after the mark, the next boot wipes before it reads anything.
func TestWipePowerCuts(t *testing.T) {
	labels := []string{boot.LabelState, boot.LabelEphemeral}
	for _, step := range []string{"marked", "wipe STATE", "wipe EPHEMERAL", "wipe META", "wiped"} {
		t.Run(step, func(t *testing.T) {
			l := newLoop(t, 4*gib)
			m := used(t, l)
			if err := m.disks.MarkWipe(labels, nil, ""); err != nil {
				t.Fatal(err)
			}
			m.off()
			if m.cut = step; step != "marked" {
				if err := m.disks.Erase(t.Context()); !errors.Is(err, errPowerCut) {
					t.Fatalf("the power should have gone before %s: %v", step, err)
				}
				// The same at the next boot.
				again := bootMachine(t, l)
				again.cut = step
				if found, err := again.mountState(); found || !errors.Is(err, errPowerCut) {
					t.Fatalf("the power should have gone before %s: %v, %v", step, found, err)
				}
			}
			next := bootMachine(t, l)
			next.disks.o.Installed = true // the disk is there, and isn't awaited
			if found, err := next.mountState(); found || err != nil {
				t.Fatalf("STATE is found: %v, %v", found, err)
			}
			wiped(t, l, labels)
		})
	}
}

// A disk that can't zero by itself is overwritten.
func TestWipeWithoutHelpOfTheDisk(t *testing.T) {
	l := newLoop(t, 4*gib)
	used(t, l).off()
	p := l.partition(boot.LabelState)
	l.Change(func(dev *os.File) error { return errors.Join(disk.Zero(t.Context(), dev, p.Start, p.Size), dev.Sync()) })
	if l.Holds("the secret of STATE") || !l.Holds("the secret of EPHEMERAL") {
		t.Error("not just STATE was zeroed")
	}
}

// brief is a context that ends after it was checked some times.
type brief struct {
	context.Context
	looks int
}

func (b *brief) Err() error {
	if b.looks--; b.looks < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

// The shutdown has a budget: erasing ends with it, also on a disk that zeroes by itself.
func TestEraseEndsWithItsTime(t *testing.T) {
	l := newLoop(t, 8*gib)
	m := used(t, l)
	if err := m.disks.MarkWipe([]string{boot.LabelEphemeral}, nil, ""); err != nil {
		t.Fatal(err)
	}
	m.off()
	if err := m.disks.Erase(&brief{t.Context(), 2}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	wiped(t, l, []string{boot.LabelEphemeral}) // by the next boot
}

// In a container the partitions are directories of the host, and a reset
// doesn't wipe mounts below them.
func TestWipeContainer(t *testing.T) {
	for _, cut := range []string{"", "marked", "wipe EPHEMERAL", "wipe STATE", "wiped"} {
		t.Run("cut at "+cut, func(t *testing.T) {
			m := bootMachine(t)
			m.disks.o.Mode = boot.Container
			for _, dir := range []string{"var/lib", "var/volume", "state/operations", "elsewhere"} {
				if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, file := range []string{"state/config.yaml", "state/operations/one.json", "var/lib/key", "elsewhere/precious"} {
				m.write(file, "x")
			}
			if err := unix.Mount(filepath.Join(m.dir, "elsewhere"), filepath.Join(m.dir, "var/volume"), "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Unmount(filepath.Join(m.dir, "var/volume"), unix.MNT_DETACH) })
			if err := m.disks.MarkWipe(boot.WipeLabels, nil, ""); err != nil {
				t.Fatal(err)
			}
			if m.cut = cut; cut != "marked" {
				if err := m.disks.Erase(t.Context()); cut != "" && !errors.Is(err, errPowerCut) || cut == "" && err != nil {
					t.Fatal(err)
				}
			}
			m.cut = ""
			if found, err := m.mountState(); !found || err != nil {
				t.Fatal(found, err)
			}
			m.read("elsewhere/precious")
			if left := names(t, m.dir, "var"); len(left) > 0 {
				t.Errorf("left in /var: %v", left)
			}
			if left := names(t, m.dir, "state"); !slices.Equal(left, []string{filepath.Base(boot.ResetFile)}) {
				t.Errorf("left on STATE: %v", left)
			}
		})
	}
}

func names(t *testing.T, dir ...string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir...))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestMarkWipeRefuses(t *testing.T) {
	m := bootMachine(t)
	for _, labels := range [][]string{nil, {"BOOT-A"}, {boot.LabelState}} { // the last: there is no system disk
		if err := m.disks.MarkWipe(labels, nil, ""); err == nil {
			t.Errorf("%v can be wiped", labels)
		}
	}
	if err := m.disks.Erase(t.Context()); err != nil || m.disks.Marked() {
		t.Errorf("what was refused is marked (%v), or erased: %v", m.disks.Marked(), err)
	}
}

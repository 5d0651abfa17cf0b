package slots

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// The life of a machine: installed, upgraded, back to the former system after one that failed, upgraded again, rolled
// back.
func TestLifeOfAMachine(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	s := m.boot("")
	m.want(s, "A empty, B empty")
	if where, err := s.Where(); err != nil || where != "slot A of "+filepath.Join(m.dir, "disk")+" (EFI 512 MiB, BIOS 1 MiB)" {
		t.Errorf("%q, %v", where, err)
	}
	must(t, m.write(s))
	m.want(s, "A trying v1 next, B empty")
	entry, err := os.ReadFile(filepath.Join(m.dir, "efi/loader/entries/garboard-a+1.conf"))
	must(t, err)
	// Not the argument of the medium, and those of the machine.
	if want := "\noptions quiet garboard.platform=metal garboard.config=http://10.0.0.1/a mine=1 garboard.slot=A garboard.trial=alone\n"; !strings.HasSuffix(string(entry), want) {
		t.Errorf("%s", entry)
	}
	s = m.boot("A")
	m.want(s, "A trying v1 next, B empty")
	must(t, s.Prove(t.Context(), "healthy"))
	m.want(s, "A good v1 next, B empty")

	m.lay(signer.Signed(t, signer.Release, esp.Medium{Version: "v9.1.0", File: "efi.img", From: "v9.0.0"}, uki.Image(t, "v9.1.0", "quiet")))
	if _, err := s.Medium(t.Context(), false); err == nil || !strings.Contains(err.Error(), "upgrades machines from release v9.0.0 on") {
		t.Errorf("a system that can't take over this one's data: %v", err)
	}
	m.insert("v2")
	m.put("loaders/"+esp.SystemdBoot, []byte("of another release"))
	must(t, m.write(s))
	m.want(s, "A good v1, B trying v2 next")
	if loader, err := os.ReadFile(filepath.Join(m.dir, "efi/EFI/BOOT/BOOTX64.EFI")); err != nil || string(loader) != "systemd-boot" {
		t.Errorf("what starts the good system was replaced: %q, %v", loader, err)
	}
	// systemd-boot starts it, and it ends.
	must(t, os.Rename(filepath.Join(m.dir, "efi/loader/entries/garboard-b+1.conf"), filepath.Join(m.dir, "efi/loader/entries/garboard-b+0-1.conf")))
	s = m.boot("A")
	m.want(s, "A good v1 next, B bad v2")
	if got := m.entries(); got != "garboard-a.conf garboard-b+0.conf" {
		t.Error(got)
	}

	must(t, m.write(s))
	s = m.boot("B")
	m.want(s, "A good v1 next, B trying v2")
	if err := s.Fail(t.Context(), "no kubelet"); err != nil {
		t.Fatal(err)
	}
	s = m.boot("A")
	if status, err := Statuses.Get(s.o.Store, "B"); err != nil || status.Spec.Reason != "no kubelet" || time.Since(status.Spec.Since) > time.Hour {
		t.Errorf("%+v, %v", status, err)
	}

	must(t, m.write(s))
	s = m.boot("B")
	must(t, s.Prove(t.Context(), "healthy"))
	m.want(s, "A good v1, B good v2 next")
	// The power goes before the boot loaders know of a rollback: the former system wasn't started.
	_, err = s.record(func(slots *boot.Slots) error { return slots.Rollback("B", "asked", nil, time.Now()) })
	must(t, err)
	s = m.boot("B")
	m.want(s, "A trying v1 next, B good v2")
	must(t, s.Stay(t.Context()))
	m.want(s, "A good v1, B good v2 next")
	if got := m.entries(); got != "garboard-a.conf garboard-b.conf" {
		t.Error(got)
	}
	system := filepath.Join(m.dir, "efi/EFI/garboard/A.efi")
	whole, err := os.ReadFile(system)
	must(t, err)
	must(t, os.WriteFile(system, whole[:100], 0o600))
	if err := s.Rollback(t.Context(), "asked", nil); err == nil || !strings.Contains(err.Error(), "roll back to slot A: unified kernel image") {
		t.Errorf("to a damaged system: %v", err)
	}
	m.want(s, "A good v1, B good v2 next")
	must(t, os.WriteFile(system, whole, 0o600))
	must(t, s.Rollback(t.Context(), "asked", []string{"timed"}))
	m.want(s, "A trying v1 next, B good v2")
	if got := m.entries(); got != "garboard-a+1.conf garboard-b.conf" {
		t.Error(got)
	}
	entry, err = os.ReadFile(filepath.Join(m.dir, "efi/loader/entries/garboard-a+1.conf"))
	must(t, err)
	if !strings.HasSuffix(string(entry), " mine=1 garboard.slot=A garboard.trial=back\n") {
		t.Errorf("%s", entry)
	}
	s = m.boot("A")
	m.want(s, "A trying v1, B good v2 next")
	must(t, s.Prove(t.Context(), "healthy"))
	m.want(s, "A good v1 next, B good v2")
	if got := m.entries(); got != "garboard-a.conf garboard-b.conf" {
		t.Error(got)
	}

	// META is wiped by a reset: the system that runs is known to work.
	m.put("meta", make([]byte, 1<<20))
	s = m.boot("A")
	m.want(s, "A good "+boot.Version+" next, B empty")
}

// The reason of a system that was started and didn't come up has what is known of the end of its boot.
func TestReasonOfAFailedSystem(t *testing.T) {
	t.Parallel()
	const restarted = "it was started, and didn't become healthy before the machine restarted"
	for want, known := range map[string]rig{
		restarted: {boots: []configuration.Boot{{Slot: "B"}, {Slot: "A", Exit: "the end of another"}, {Slot: "A"}}},
		restarted + ": the kernel panicked: VFS: no root": {panicked: "VFS: no root", boots: []configuration.Boot{{Slot: "A"}}},
		restarted + ": without a shutdown":                {boots: []configuration.Boot{{Slot: "A"}, {Slot: "B", Exit: "without a shutdown"}, {Slot: "A"}}},
	} {
		m := newMachine(t)
		m.insert("v1")
		must(t, m.write(m.boot("")))
		s := m.boot("A")
		must(t, s.Prove(t.Context(), "healthy"))
		must(t, m.write(s))
		must(t, os.Rename(filepath.Join(m.dir, "efi/loader/entries/garboard-b+1.conf"), filepath.Join(m.dir, "efi/loader/entries/garboard-b+0-1.conf")))
		m.panicked, m.boots = known.panicked, known.boots
		if status, err := Statuses.Get(m.boot("A").o.Store, "B"); err != nil || status.Spec.State != boot.SlotBad || status.Spec.Reason != want {
			t.Errorf("%+v, %v, want %q", status.Spec, err, want)
		}
	}
}

// A firmware that has lost its entries gets that of this disk again at the next boot.
func TestFirmwareThatForgets(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	must(t, m.write(m.boot("")))
	must(t, m.boot("A").Prove(t.Context(), "healthy"))
	m.boot("A")
	must(t, os.Mkdir(filepath.Join(m.dir, "firmware"), 0o700))
	m.boot("A")
	made, err := filepath.Glob(filepath.Join(m.dir, "firmware", "Boot*"))
	if err != nil || len(made) != 2 {
		t.Errorf("%q, %v, want an entry and the order", made, err)
	}
}

// Wherever an upgrade is cut off, the machine boots a system that is known to work, or one that is complete and on
// trial.
func TestUpgradeThatIsCutOff(t *testing.T) {
	t.Parallel()
	cut := errors.New("the power is gone")
	for at := range 7 {
		m := newMachine(t)
		m.insert("v1")
		must(t, m.write(m.boot("")))
		s := m.boot("A")
		must(t, s.Prove(t.Context(), "healthy"))
		m.insert("v2")
		src, err := s.Medium(t.Context(), false)
		must(t, err)
		n := 0
		m.before = func(string) error {
			if n++; n > at {
				return cut
			}
			return nil
		}
		err = s.Write(t.Context(), "B", src, boot.Slot{}, nil)
		m.before = func(string) error { return nil }
		s = m.boot("A")
		if err != nil {
			if !errors.Is(err, cut) {
				t.Fatal(err)
			}
			all, err := s.Get()
			must(t, err)
			if all.Next() != "A" && (all.B.State != boot.SlotTrying || m.entries() != "garboard-a.conf garboard-b+1.conf") {
				t.Errorf("cut at %d: %+v, %s", at, all, m.entries())
			}
		}
		must(t, m.write(s))
		m.want(s, "A good v1, B trying v2 next")
		s = m.boot("B")
		if err := errors.Join(s.Empty(t.Context(), "B"), s.Write(t.Context(), "B", src, boot.Slot{}, nil)); err == nil || strings.Count(err.Error(), "it has the system that runs") != 2 {
			t.Errorf("the running system: %v", err)
		}
		m.want(s, "A good v1 next, B trying v2")
	}
}

// A boot counts once, however often its service begins, and the boot loaders follow at last.
func TestBeginsAgain(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	m.insert("v2")
	must(t, m.write(s))
	s = m.started("B")
	m.before = func(string) error { return errors.New("the partition can't be read") }
	if err := s.Begin(t.Context()); err == nil || s.Begun() {
		t.Errorf("it has begun: %v", err)
	}
	m.before = func(string) error { return nil }
	for range 2 {
		must(t, s.Begin(t.Context()))
		m.want(s, "A good v1 next, B trying v2")
		if got := m.entries(); got != "garboard-a.conf garboard-b+0.conf" {
			t.Error(got)
		}
	}
	must(t, s.Prove(t.Context(), "healthy"))
	m.want(s, "A good v1, B good v2 next")
}

// A staged system that a boot loader starts after META doesn't know it any more is on trial.
func TestForgottenSystemIsOnTrial(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	must(t, m.write(s))
	m.before = func(string) error { return errors.New("the power is gone") }
	if err := s.Empty(t.Context(), "B"); err == nil {
		t.Error("it is empty")
	}
	m.before = func(string) error { return nil }
	s = m.boot("B garboard.trial")
	m.want(s, "A good v1 next, B trying "+boot.Version)
}

// Wherever an installation is cut off, the firmware starts the medium again, or a complete system.
func TestInstallationThatIsCutOff(t *testing.T) {
	t.Parallel()
	cut := errors.New("the power is gone")
	for at := range 9 {
		m := newMachine(t)
		m.insert("v1")
		n := 0
		m.before = func(string) error {
			if n++; n > at {
				return cut
			}
			return nil
		}
		err := m.write(m.boot(""))
		m.before = func(string) error { return nil }
		if err != nil && !errors.Is(err, cut) {
			t.Fatal(err)
		}
		record, readErr := os.ReadFile(filepath.Join(m.dir, "disk"))
		must(t, readErr)
		_, noLoader := os.Stat(filepath.Join(m.dir, "efi/EFI/BOOT/BOOTX64.EFI"))
		if noLoader == nil || !bytes.Equal(record[:512], make([]byte, 512)) {
			if system, err := os.ReadFile(filepath.Join(m.dir, "efi/EFI/garboard/A.efi")); err != nil || !bytes.Equal(system, uki.Image(t, "v1", "quiet "+boot.ISOArgument)) || m.entries() != "garboard-a+1.conf" {
				t.Errorf("cut at %d: a loader is there, and no system: %v, %q", at, err, m.entries())
			}
		}
		s := m.boot("")
		must(t, m.write(s))
		m.want(s, "A trying v1 next, B empty")
	}
}

package slots

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// A system that doesn't fit is refused while the former one is still in its slot. What is in the slot is room, too.
func TestSystemWithoutRoom(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	m.insert("v2")
	must(t, m.write(s))
	s = m.boot("B")
	must(t, s.Prove(t.Context(), "healthy"))

	src, err := s.Medium(t.Context(), false)
	must(t, err)
	m.put("medium/efi.img", append(make([]byte, src.Offset), uki.Image(t, "v2", "quiet "+boot.ISOArgument)...))
	src.Size = 1 << 60
	if err := s.Verify(t.Context(), src, nil); err == nil || !strings.Contains(err.Error(), "in slot A, which keeps what it has") {
		t.Errorf("%v", err)
	}
	m.want(m.boot("B"), "A good v1, B good v2 next")
	if got := m.entries(); got != "garboard-a.conf garboard-b.conf" {
		t.Error(got)
	}
	const tib = 1 << 40 // more than the disk of the test
	must(t, os.Truncate(filepath.Join(m.dir, "efi/EFI/garboard/A.efi"), 8*tib))
	src.Size = 7 * tib
	must(t, s.Verify(t.Context(), src, nil))
}

// The system of an image is as good as that of a medium. The image is removed afterwards.
func TestSystemOfAnImage(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.boot("")
	if _, err := s.Pull(t.Context(), "missing", false, nil); err == nil || err.Error() != "not found" {
		t.Error(err)
	}
	report := func(int64, int64) {}
	if _, err := s.Pull(t.Context(), "other", false, report); err == nil || err.Error() != "other is no installer image: it has no /usr/install/garboard.json" {
		t.Error(err)
	}
	m.insert("v1")
	src, err := s.Pull(t.Context(), "installer", false, report)
	must(t, err)
	must(t, s.Verify(t.Context(), src, nil))
	must(t, s.Write(t.Context(), "A", src, boot.Slot{}, nil))
	m.want(s, "A trying v1 next, B empty")
	if _, err := os.Stat(filepath.Join(m.dir, "installer")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image is kept: %v", err)
	}
	m.put("medium/efi.img", []byte("short"))
	src, err = s.Pull(t.Context(), "installer", false, report)
	must(t, err)
	if err := s.Verify(t.Context(), src, nil); err == nil || !strings.Contains(err.Error(), "the system in the image installer is damaged") {
		t.Error(err)
	}
}

// A kernel that lies beside the system of an image replaces that of the system, if the modules are for it.
func TestKernelOfAnImage(t *testing.T) {
	t.Parallel()
	const other = "6.13.0-other"
	m := newMachine(t)
	s := m.boot("")
	image := uki.Image(t, "v1", "quiet")
	describe := func(modules string) {
		kernel := sha256.Sum256(uki.Linux(uki.Release))
		m.lay(signer.Signed(t, signer.Release, esp.Medium{Version: "v1", File: "efi.img", Kernel: hex.EncodeToString(kernel[:]), Modules: modules}, image))
	}
	pull := func() (Source, error) {
		must(t, boot.IgnoreMissing(os.Remove(filepath.Join(m.dir, "installer"))))
		return s.Pull(t.Context(), "installer", false, func(int64, int64) {})
	}
	m.put("medium/efi.img", image)
	describe(uki.Release)
	m.put("medium/"+esp.KernelFile, uki.Linux(uki.Release))
	if src, err := pull(); err != nil || src.Replaced {
		t.Errorf("its own kernel: %+v, %v", src, err)
	}
	m.put("medium/"+esp.KernelFile, uki.Linux(other))
	if _, err := pull(); err == nil || !strings.Contains(err.Error(), "has Linux "+other+", and modules for Linux "+uki.Release) {
		t.Errorf("modules of another kernel: %v", err)
	}
	describe(other)
	if _, err := pull(); err == nil || !strings.Contains(err.Error(), "the system in the image installer isn't signed with the kernel that is to replace its own") {
		t.Errorf("a kernel that nobody has vouched for: %v", err)
	}
	m.config = &config.Config{Machine: config.Machine{Install: config.Install{Unsigned: true}}}
	s = m.boot("")
	src, err := pull()
	must(t, err)
	must(t, s.Verify(t.Context(), src, nil))
	must(t, s.Write(t.Context(), "A", src, boot.Slot{}, nil))
	m.want(s, "A trying v1 next, B empty")
	written, err := os.ReadFile(filepath.Join(m.dir, "efi/EFI/garboard/A.efi"))
	must(t, err)
	if !src.Replaced || !bytes.Contains(written, uki.Linux(other)) || bytes.Contains(written, uki.Linux(uki.Release)) {
		t.Errorf("the slot hasn't the other kernel: %+v", src)
	}
	image[len(image)-1] ^= 1
	m.put("medium/efi.img", image)
	if _, err := pull(); err == nil || !strings.Contains(err.Error(), "is damaged") {
		t.Errorf("a damaged system: %v", err)
	}
	m.put("medium/"+esp.KernelFile, []byte("no kernel"))
	if _, err := pull(); err == nil || !strings.Contains(err.Error(), "vmlinuz in the image installer: it is no Linux kernel") {
		t.Errorf("no kernel: %v", err)
	}
}

// A medium with one wrong bit anywhere is refused before anything is written.
func TestDamagedMedium(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	s := m.boot("")
	whole, err := os.ReadFile(filepath.Join(m.dir, "medium/efi.img"))
	must(t, err)
	end := len(whole) - len("more")
	for at := 100; at < end; at += 97 {
		damaged := bytes.Clone(whole)
		damaged[at] ^= 1 << (at % 8)
		m.put("medium/efi.img", damaged)
		if err := m.write(s); err == nil || !strings.Contains(err.Error(), "the system on the medium GARBOARD is damaged") {
			t.Fatalf("byte %d: %v", at, err)
		}
		if err := s.Sound(t.Context()); err == nil || !strings.Contains(err.Error(), "the system on the medium GARBOARD is damaged") {
			t.Fatalf("byte %d, before the disk is erased: %v", at, err)
		}
	}
	m.put("medium/efi.img", whole)
	if err := s.Sound(t.Context()); err != nil {
		t.Error(err)
	}
	m.put("medium/efi.img", whole[:end-1])
	if err := m.write(s); err == nil {
		t.Error("a medium that was cut off is taken")
	}
	m.want(s, "A empty, B empty")
	if files, err := os.ReadDir(filepath.Join(m.dir, "efi")); err != nil || len(files) > 0 {
		t.Errorf("%v was written, %v", files, err)
	}
	m.lay(signer.Signed(t, signer.Release, esp.Medium{Version: "v9.1.0", File: "efi.img", From: "v9.0.0"}, uki.Image(t, "v9.1.0", "quiet")))
	if _, err := s.Medium(t.Context(), false); err != nil {
		t.Errorf("a new machine takes it: %v", err)
	}
	m.put("medium/"+esp.MediumFile, []byte(`{"size": -1}`))
	if _, err := s.Medium(t.Context(), false); err == nil || !strings.Contains(err.Error(), "describes no system") {
		t.Errorf("%v", err)
	}
}

// Pods may run on an installed machine, and their volumes can have any label.
func TestUpgradesComeFromMedia(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	asks := func(s *Slots, want string) {
		t.Helper()
		if _, err := s.Medium(t.Context(), false); err != nil || m.asked != want {
			t.Errorf("%s are asked for, want %s; %v", m.asked, want, err)
		}
	}
	s := m.boot("")
	asks(s, "volumes")
	must(t, m.write(s))
	asks(m.boot("A"), "media")
	m.known = true
	asks(m.boot(""), "media") // it boots over the network each time
}

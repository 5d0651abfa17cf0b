package slots

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

func (m *rig) configure(install config.Install) {
	m.config = &config.Config{Machine: config.Machine{Install: install}}
}

// A system of which nobody has vouched isn't run, from wherever it comes, and the slot keeps what it has.
func TestUnsignedSystem(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1.0.0")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	image := uki.Image(t, "v2.0.0", "quiet")
	described := esp.Medium{Version: "v2.0.0", File: "efi.img"}
	owned := signer.Signed(t, "the owner", described, image)
	m.put("medium/efi.img", image)
	refused := func(what string, files map[string][]byte, want string) {
		t.Helper()
		m.lay(files)
		for _, slot := range []string{"A", ""} {
			s := m.boot(slot)
			for place, err := range map[string]error{"medium GARBOARD": m.write(s), "image installer": m.pull(s)} {
				if err == nil || !strings.Contains(err.Error(), place+": release v2.0.0 "+want) {
					t.Errorf("%s, slot %q: %v", what, slot, err)
				}
			}
		}
		m.want(m.boot("A"), "A good v1.0.0 next, B empty")
		if _, err := os.Stat(filepath.Join(m.dir, "efi/EFI/garboard/B.efi")); err == nil {
			t.Errorf("%s: something was written", what)
		}
	}
	refused("another key", owned, "isn't signed by one of the 1 keys")
	refused("no signature", map[string][]byte{esp.MediumFile: owned[esp.MediumFile]}, "isn't signed")
	cut := map[string][]byte{esp.MediumFile: owned[esp.MediumFile], signed.StatementFile: owned[signed.StatementFile], signed.SignatureFile: owned[signed.SignatureFile][:10]}
	refused("cut off", cut, "has a signature of 10 bytes")
	m.lay(owned)
	if err := m.boot("").Sound(t.Context()); err == nil || !strings.Contains(err.Error(), "isn't signed by one of") {
		t.Errorf("before the disk is erased: %v", err)
	}

	public := strings.Split(string(signer.Public(t, "the owner")), "\n")[1]
	m.configure(config.Install{Keys: []string{public}})
	s = m.boot("A")
	must(t, m.write(s))
	m.want(s, "A good v1.0.0, B trying v2.0.0 next")

	m.configure(config.Install{Unsigned: true})
	s = m.boot("A")
	m.lay(map[string][]byte{esp.MediumFile: owned[esp.MediumFile]})
	src, err := s.Medium(t.Context(), false)
	must(t, err)
	if got := src.String(); got != "Garboard v2.0.0 on the medium GARBOARD, which isn't signed and is taken because of machine.install.unsigned" {
		t.Error(got)
	}
	must(t, m.write(s))
	m.want(s, "A good v1.0.0, B trying v2.0.0 next")
}

func (m *rig) pull(s *Slots) error {
	must(m.t, boot.IgnoreMissing(os.Remove(filepath.Join(m.dir, "installer"))))
	_, err := s.Pull(m.t.Context(), "installer", false, func(int64, int64) {})
	return err
}

// A medium that shows another program when it is read again doesn't get it run: not one of its bytes.
func TestMediumThatChanges(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1.0.0")
	s := m.boot("")
	src, err := s.Medium(t.Context(), false)
	must(t, err)
	must(t, s.Verify(t.Context(), src, nil))
	ran := false
	run := s.o.run
	s.o.run = func(ctx context.Context, program, in io.Reader, out io.Writer, slot *os.File) error {
		content := new(bytes.Buffer)
		if _, err := content.ReadFrom(program); err != nil {
			return err
		}
		ran = true
		return run(ctx, content, in, out, slot)
	}
	m.put("medium/efi.img", append(make([]byte, 100), uki.ImageOf(t, "v1.0.0", "quiet "+boot.ISOArgument, "the program of v1.0.0 and more")...))
	if err := s.Write(t.Context(), "A", src, boot.Slot{}, nil); err == nil || !strings.Contains(err.Error(), "its program has the SHA-256") || ran {
		t.Errorf("it was run: %v; %v", ran, err)
	}
	m.want(s, "A empty, B empty")
	m.insert("v1.0.0")
	must(t, s.Write(t.Context(), "A", src, boot.Slot{}, nil))
	if !ran {
		t.Error("the program that was signed wasn't run")
	}
}

// A release below the highest one that was healthy comes only on request, however the machine got to where it is.
func TestFloor(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1.0.0")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	older := func(s *Slots, version string) error {
		m.insert(version)
		return m.write(s)
	}
	m.insert("v3.0.0")
	must(t, m.write(s))
	must(t, older(s, "v2.0.0")) // the newer one hasn't proved itself
	m.insert("v3.0.0")
	must(t, m.write(s))
	s = m.boot("B")
	must(t, s.Prove(t.Context(), "healthy"))
	want := "release v2.0.0 is older than v3.0.0, which was healthy on this machine"
	if err := older(s, "v2.0.0"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
	must(t, s.Rollback(t.Context(), "asked", nil)) // the system in the other slot was good here
	s = m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	m.want(s, "A good v1.0.0 next, B good v3.0.0")
	if err := older(s, "v2.0.0"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("after a rollback: %v", err)
	}
	src, err := s.Medium(t.Context(), true)
	must(t, err)
	must(t, s.Write(t.Context(), "B", src, boot.Slot{}, nil))
	m.want(s, "A good v1.0.0, B trying v2.0.0 next")
	s = m.boot("B")
	must(t, s.Prove(t.Context(), "healthy"))
	if err := older(s, "v2.9.9"); err == nil || !strings.Contains(err.Error(), "is older than v3.0.0") {
		t.Errorf("the floor went down: %v", err)
	}
	must(t, older(s, "v3.0.0"))
}

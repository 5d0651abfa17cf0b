package qemu

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
)

// The committed guest is what its source says.
func TestProbeIsItsSource(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	object, binary := filepath.Join(dir, "probe.o"), filepath.Join(dir, "probe.bin")
	for _, args := range [][]string{
		{"as", "-o", object, "probe.asm"},
		{"objcopy", "-O", "binary", "-j", ".text", object, binary},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	got, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, probeCode) {
		t.Error("probe.bin isn't what probe.asm assembles to")
	}
}

// emulatedBudget is for the guest in a QEMU that waits for its turn beside other machines.
const emulatedBudget = 30 * time.Second

// Under emulation the guest runs everywhere.
func TestProbeGuestRuns(t *testing.T) {
	t.Parallel()
	if err := probe(t.Context(), eventually.Scale(emulatedBudget), "tcg", "max"); err != nil {
		t.Error(err)
	}
}

// The negative twins: no such accelerator, and a caller that gives up.
func TestProbeFails(t *testing.T) {
	t.Parallel()
	if err := probe(t.Context(), emulatedBudget, "no-such-thing", "max"); err == nil || !strings.Contains(err.Error(), "no-such-thing") {
		t.Errorf("probe with an unknown accelerator: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := probe(ctx, emulatedBudget, "tcg", "max"); err == nil {
		t.Error("a cancelled probe passed")
	}
}

// The reason is a line, whatever QEMU prints: scripts and tests read the next one.
func TestProbeSaysOneLine(t *testing.T) {
	t.Parallel()
	const said = "qemu-system-x86_64: error: failed to set MSR 0xd90 to 0x0\n\nqemu-system-x86_64: Assertion `ret == nmsrs' failed.\n"
	const want = "qemu-system-x86_64: error: failed to set MSR 0xd90 to 0x0; qemu-system-x86_64: Assertion `ret == nmsrs' failed."
	if got := oneLine(said); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestChoice(t *testing.T) {
	t.Parallel()
	absent, hangs := errors.New("not found"), errors.New("no hardware virtualisation: it hangs")
	for _, tc := range []struct {
		name      string
		want      string
		root      bool
		qemu, kvm error
		text      string
	}{
		{"KVM works", Auto, false, nil, nil, "nodes run in QEMU (kvm): KVM ran a test guest"},
		{"KVM works, root", Auto, true, nil, nil, "nodes run in QEMU (kvm): KVM ran a test guest"},
		{"KVM hangs, root", Auto, true, nil, hangs, "nodes run as containers: no hardware virtualisation: it hangs"},
		{"KVM hangs, user", "", false, nil, hangs, "nodes run in QEMU (tcg): emulated, ten times slower; no hardware virtualisation: it hangs, and containers need root"},
		{"no QEMU, root", Auto, true, absent, nil, "nodes run as containers: no QEMU here (not found)"},
		{"no QEMU, user", Auto, false, absent, nil, "error: not found; install qemu-system-x86, or run as root to have nodes as containers"},
		{"container", Container, true, nil, nil, "nodes run as containers: asked for"},
		{"container, user", Container, false, nil, nil, "error: nodes as containers need root, for namespaces and cgroups: run as root (sudo), or take PROVISIONER=qemu"},
		{"QEMU", QEMU, true, nil, hangs, "nodes run in QEMU (tcg): asked for; emulated in software, as there is no hardware virtualisation: it hangs"},
		{"QEMU with KVM", QEMU, true, nil, nil, "nodes run in QEMU (kvm): asked for; KVM ran a test guest"},
		{"unknown", "docker", true, nil, nil, `error: provisioner "docker": must be qemu, container or auto`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, err := chooser{
				root: tc.root,
				qemu: func() error { return tc.qemu },
				kvm:  func() error { return tc.kvm },
			}.choose(tc.want)
			got := c.String()
			if err != nil {
				got = "error: " + err.Error()
			}
			if got != tc.text {
				t.Errorf("got  %s\nwant %s", got, tc.text)
			}
		})
	}
}

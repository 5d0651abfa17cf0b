package vm

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// probe.bin is assembled from probe.asm.
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

// emulatedBudget is for the guest in a QEMU that shares the processors with other machines.
const emulatedBudget = 30 * time.Second

// Under emulation the guest runs everywhere.
func TestProbeGuestRuns(t *testing.T) {
	t.Parallel()
	if err := probe(t.Context(), eventually.Scale(emulatedBudget), "tcg", "max"); err != nil {
		t.Error(err)
	}
}

// An unknown accelerator and a cancelled context fail.
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

// The reason is one line, whatever QEMU prints: scripts and tests read the next one.
func TestProbeErrorIsOneLine(t *testing.T) {
	t.Parallel()
	const said = "qemu-system-x86_64: error: failed to set MSR 0xd90 to 0x0\n\nqemu-system-x86_64: Assertion `ret == nmsrs' failed.\n"
	const want = "qemu-system-x86_64: error: failed to set MSR 0xd90 to 0x0; qemu-system-x86_64: Assertion `ret == nmsrs' failed."
	if got := oneLine(said); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

//go:build e2e && long

package installed

import (
	"io"
	"os"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// A reset of all partitions leaves the system, and nothing of what a machine was: STATE and META are zeros. The machine
// starts from its disk and waits for a configuration, again and again, and with one, it serves its API, and its system
// is good. (S-180, S-184)
func TestResetOfAMachine(t *testing.T) {
	m := start(t, qemu.QEMU)
	maintained := func(before int) {
		t.Helper()
		m.Says(2*bootBudget, before, "maintenance mode", "SHA-256")
	}
	before := len(m.Text())
	m.Gbctl("-n", m.Node(), "reset", "--graceful=false", "--reboot", "--yes")
	maintained(before)
	m.Reached("after a reset, the machine waits for a configuration")
	if err := m.Cut(t.Context(), m.Node()); err != nil {
		t.Fatal(err)
	}
	for _, place := range boot.Places(diskGiB << 30) {
		if place.Label == boot.LabelMeta || place.Label == boot.LabelState {
			zeros(t, m.disk(), place)
		}
	}
	before = len(m.Text())
	if err := m.On(t.Context(), m.Node()); err != nil {
		t.Fatal(err)
	}
	maintained(before)
	m.Reached("it still does after a power cut")
	m.Gbctl("-n", m.Nodes[0].Address.String(), "apply-config", "--insecure", "-f", m.Configuration(m.Node()))
	// it has its own version: META had that of the medium
	m.slots("A good " + e2etest.Parts(t).Version + " yes yes it was found running")
	m.Reached("with a configuration, its system is good")
}

// zeros checks that a partition has nothing else.
func zeros(t *testing.T, disk string, place boot.Place) {
	t.Helper()
	f, err := os.Open(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	content, err := io.ReadAll(io.NewSectionReader(f, place.Start, place.Size))
	if err != nil {
		t.Fatal(err)
	}
	others := 0
	for _, b := range content {
		if b != 0 {
			others++
		}
	}
	if int64(len(content)) != place.Size || others > 0 {
		t.Errorf("%s has %d bytes that aren't zero, of %d", place.Label, others, len(content))
	}
}

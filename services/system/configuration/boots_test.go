package configuration

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/core/resource"
)

// Each boot knows how the one before has ended, also if that couldn't say it.
func TestBoots(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	boot := func(slot string, panicked ...string) (exits []string) {
		t.Helper()
		store := resource.NewStore()
		a := NewApplier(ApplierOptions{Store: store, StateDir: dir, Log: slog.New(slog.DiscardHandler)})
		for range 2 { // STATE can be mounted again
			if err := a.RecordBoot(slot, strings.Join(panicked, "")); err != nil {
				t.Fatal(err)
			}
		}
		for _, b := range Boots.List(store) {
			exits = append(exits, b.ID+" "+b.Spec.Slot+" "+b.Spec.Exit)
		}
		return exits
	}
	end := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "last-exit"), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	boot("A")
	end("2026-01-01T00:00:00Z reboot: by admin")
	boot("A")
	boot("B") // the power was cut
	boot("B", "NMI")
	end("2026-01-02T00:00:00Z poweroff: by admin")
	want := "000001 A 2026-01-01T00:00:00Z reboot: by admin|000002 A " + noReason + "|000003 B the kernel panicked: NMI|000004 B 2026-01-02T00:00:00Z poweroff: by admin|000005 A "
	if got := strings.Join(boot("A"), "|"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for range maxBoots {
		boot("A")
	}
	if all := boot("A"); len(all) != maxBoots || !strings.HasPrefix(all[maxBoots-1], "000038 ") {
		t.Errorf("%d boots, the last is %s", len(all), all[len(all)-1])
	}
	if err := os.WriteFile(filepath.Join(dir, bootsFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if all := boot("A"); len(all) != 1 {
		t.Errorf("after a damaged history: %q", all)
	}
}

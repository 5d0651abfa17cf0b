package machine

import (
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/core/resource"
)

// S-037: a change that comes before STATE is mounted is refused in every mode, also when it is
// to wait for a reboot: the next boot would not have it. As soon as STATE is mounted, the node
// takes changes, whatever its boot still waits for.
func TestS037ChangesBeforeState(t *testing.T) {
	base, store := document(t), resource.NewStore()
	a := NewApplier(ApplierOptions{
		Store: store, StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Reboot: func(why string) { t.Errorf("a reboot: %s", why) },
	})
	if err := a.begin("medium", with(base, "one")); err != nil {
		t.Fatal(err)
	}
	hostname := func() string {
		t.Helper()
		c, err := Config(store)
		if err != nil {
			t.Fatal(err)
		}
		return c.Machine.Network.Hostname
	}
	for _, mode := range []Mode{Auto, Immediate, OnReboot, Reboot, Try} {
		_, err := a.Apply(t.Context(), Request{Text: with(base, "two"), Mode: mode})
		if !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "STATE isn't mounted yet") {
			t.Errorf("mode %s before STATE: %v", mode, err)
		}
	}
	if files, err := os.ReadDir(a.o.StateDir); err != nil || len(files) > 0 || hostname() != "one" {
		t.Errorf("refused changes have left %v, %v, hostname %s", files, err, hostname())
	}

	if err := a.StateReady(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Apply(t.Context(), Request{Text: with(base, "two"), Mode: Auto}); err != nil || hostname() != "two" {
		t.Errorf("with STATE: %v, hostname %s", err, hostname())
	}
	if _, err := a.Apply(t.Context(), Request{Text: with(base, "three"), Mode: OnReboot}); err != nil || !a.Situation().Staged {
		t.Errorf("staged with STATE: %v", err)
	}
	kept, err := os.ReadFile(a.stored.config())
	if err != nil || !strings.Contains(string(kept), "hostname: two") {
		t.Errorf("STATE has %q, %v", kept, err)
	}
}

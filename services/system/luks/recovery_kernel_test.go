//go:build kernel

package luks

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
)

// hasRecovery checks the slots of recovery keys, and that cryptsetup opens the volume with one.
func (v *volume) hasRecovery(key string, slots ...int) {
	v.t.Helper()
	k, err := v.Recovery(v.device)
	if err != nil || !k.Encrypted || !slices.Equal(k.Slots, slots) || (len(slots) > 0) == k.Added.IsZero() {
		v.t.Errorf("recovery key %+v, %v; want slots %v", k, err, slots)
	}
	if len(slots) == 0 {
		return
	}
	cmd := exec.Command("cryptsetup", "open", "--test-passphrase", "--key-file", "-", v.device)
	cmd.Stdin = strings.NewReader(key)
	if out, err := cmd.CombinedOutput(); err != nil {
		v.t.Errorf("cryptsetup: %v: %s", err, out)
	}
}

// adds gives the volume a recovery key.
func (v *volume) adds(key string) {
	v.t.Helper()
	if err := v.AddRecovery(v.t.Context(), v.device, key); err != nil {
		v.t.Fatal(err)
	}
}

// A recovery key stays while the other keys change, another one takes its place, and cryptsetup shows it.
func TestRecoveryKeyStays(t *testing.T) {
	v := newVolume(t, key(0, "first"))
	v.create()
	first, second := client.NewRecoveryKey(), client.NewRecoveryKey()
	v.adds(first)
	v.hasRecovery(first, 31)
	out, err := exec.Command("cryptsetup", "luksDump", v.device).CombinedOutput()
	if text := string(out); err != nil || !strings.Contains(text, "0: garboard-recovery\n\tKeyslot:    31") || !strings.Contains(text, "1000") {
		t.Errorf("%v: %s", err, out)
	}
	if shown, _, err := v.Show(v.device); err != nil || shown != "LUKS2 (0 static, 31 recovery)" {
		t.Errorf("%q, %v", shown, err)
	}

	// The slots become those of the configuration, but for its slot.
	v.keys = []Key{key(0, "first"), key(1, "second")}
	for _, keys := range [][]Key{v.keys, {key(1, "second")}} {
		v.keys = keys
		if err := v.Settle(t.Context(), v.device); err != nil {
			t.Fatal(err)
		}
		v.hasRecovery(first, 31)
	}
	v.keys = []Key{key(1, "second"), key(31, "third")}
	if err := v.Settle(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), "slot 31 has the recovery key") {
		t.Error(err)
	}
	v.keys = []Key{key(1, "second")}

	v.adds(second)
	v.hasRecovery(second, 30)
	if err := v.Unlocks(t.Context(), v.device, first); err == nil || !strings.Contains(err.Error(), "isn't the recovery key of EPHEMERAL") {
		t.Errorf("the replaced key: %v", err)
	}
	v.adds(second) // S-170: again
	v.adds(first)
	v.hasRecovery(first, 30)
	if strings.Contains(v.log.String(), first) {
		t.Error("the log has the key")
	}

	// Another key stays.
	v.keys, v.kept = []Key{key(1, "none")}, nil
	if err := v.RemoveRecovery(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), "stays") {
		t.Error(err)
	}
	v.keys = []Key{key(1, "second")}
	if err := v.RemoveRecovery(t.Context(), v.device); err != nil {
		t.Error(err)
	}
	v.hasRecovery(first)
	v.is()
}

// A machine whose keys don't open the volume opens it with the recovery key, and then has its own keys in their slots.
func TestRecoveryKeyBindsTheMachineAnew(t *testing.T) {
	v := newVolume(t, key(0, "of the old mainboard"))
	v.create()
	recovery := client.NewRecoveryKey()
	v.adds(recovery)
	v.keys, v.kept = []Key{key(0, "of the new mainboard")}, nil
	v.refuses("the static key of slot 0")
	if _, err := v.Open(t.Context(), v.device); !errors.As(err, new(Locked)) {
		t.Errorf("it isn't locked: %v", err)
	}
	if err := v.Settle(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), "leave one as it was") {
		t.Errorf("settled without a key: %v", err)
	}
	given := client.NewRecoveryKey()
	v.Given = func() string { return given }
	v.refuses("the recovery key of slot 31")
	if err := v.Unlocks(t.Context(), v.device, recovery); err != nil {
		t.Error(err)
	}
	given = recovery
	v.opens()
	if err := v.Settle(t.Context(), v.device); err != nil {
		t.Fatal(err)
	}
	v.Given, v.kept = nil, nil
	v.opens()
	v.hasRecovery(recovery, 31)
	v.keys = []Key{key(0, "of the old mainboard")}
	v.refuses("the static key of slot 0")
}

// The power may go while a recovery key takes the place of another one: one of them opens the volume, and so does what
// opened it before.
func TestPowerCutWhileARecoveryKeyIsAdded(t *testing.T) {
	v := newVolume(t, key(0, "first"))
	v.create()
	old, next := client.NewRecoveryKey(), client.NewRecoveryKey()
	v.adds(old)
	for cut := 20 * time.Millisecond; ; cut += cut / 2 {
		ctx, stop := context.WithTimeout(t.Context(), cut)
		added := v.AddRecovery(ctx, v.device, next)
		stop()
		v.opens()
		if a, b := v.Unlocks(t.Context(), v.device, old), v.Unlocks(t.Context(), v.device, next); a != nil && b != nil {
			t.Errorf("neither opens it: %v, %v", a, b)
		}
		if err := v.Settle(t.Context(), v.device); err != nil {
			t.Error(err)
		}
		if added == nil {
			break
		}
	}
	k, err := v.Recovery(v.device)
	if err != nil || len(k.Slots) != 1 {
		t.Errorf("%+v, %v", k, err)
	}
	v.hasRecovery(next, k.Slots...)
	if m, err := read(v.device); err != nil || len(m.Tokens) != 1 || len(m.Keyslots) != 2 {
		t.Errorf("%+v, %v", m, err)
	}
}

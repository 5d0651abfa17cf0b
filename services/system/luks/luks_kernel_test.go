//go:build kernel

package luks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// A volume is a disk with a layer whose keys a test sets.
type volume struct {
	*Layer
	t      *testing.T
	device string
	keys   []Key
	kept   []Key
	log    bytes.Buffer
}

func newVolume(t *testing.T, keys ...Key) *volume {
	t.Helper()
	v := &volume{t: t, device: loopdisk.New(t, 64<<20).Path, keys: keys}
	v.Layer = &Layer{
		Label: "EPHEMERAL", Wipe: "gbctl reset --system-labels-to-wipe EPHEMERAL --reboot", Keys: func() ([]Key, error) { return v.keys, nil },
		Kept: func() ([]Key, error) { return v.kept, nil }, Keep: func(stay []Key) error { v.kept = slices.Concat(v.keys, stay); return nil },
		Derivation: []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"},
		Processes:  process.New(), Log: slog.New(slog.NewTextHandler(io.MultiWriter(&v.log, t.Output()), nil)),
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
	return v
}

func key(slot int, passphrase string) Key {
	return Key{Slot: slot, Kind: "static", Passphrase: []byte(passphrase)}
}

// create makes the volume, and leaves a mark on it.
func (v *volume) create() {
	v.t.Helper()
	if on, err := v.On(v.device); on || err != nil {
		v.t.Fatalf("a blank disk is encrypted: %v, %v", on, err)
	}
	if err := v.Create(v.t.Context(), v.device); err != nil {
		v.t.Fatal(err)
	}
	above := v.opens()
	if err := os.WriteFile(above, []byte(mark), 0); err != nil {
		v.t.Fatal(err)
	}
	v.is()
}

const mark = "what the volume has is here"

// opens opens the volume anew.
func (v *volume) opens() string {
	v.t.Helper()
	if err := v.Close(); err != nil {
		v.t.Fatal(err)
	}
	above, err := v.Open(v.t.Context(), v.device)
	if err != nil {
		v.t.Fatal(err)
	}
	return above
}

// is checks that the volume opens with its content, and that its header has the slots of its keys.
func (v *volume) is() {
	v.t.Helper()
	got := make([]byte, len(mark))
	f, err := os.Open(v.opens())
	if err == nil {
		_, err = io.ReadFull(f, got)
		f.Close()
	}
	if err != nil || string(got) != mark {
		v.t.Errorf("the volume has %q, %v", got, err)
	}
	var want []int
	for _, k := range v.keys {
		want = append(want, k.Slot)
	}
	slices.Sort(want)
	if slots, err := slotsIn(v.device); err != nil || !slices.Equal(slots, want) {
		v.t.Errorf("it has the slots %v, %v; want %v", slots, err, want)
	}
}

// settles gives the volume other keys.
func (v *volume) settles(keys ...Key) {
	v.t.Helper()
	v.keys = keys
	if err := v.Settle(v.t.Context(), v.device); err != nil {
		v.t.Fatal(err)
	}
	v.kept = nil
	v.is()
	v.kept = keys
}

// refuses checks that the volume isn't opened, and why.
func (v *volume) refuses(why string) {
	v.t.Helper()
	if err := v.Close(); err != nil {
		v.t.Fatal(err)
	}
	if above, err := v.Open(v.t.Context(), v.device); err == nil || !strings.Contains(err.Error(), why) {
		v.t.Errorf("opened %q, %v; want an error with %q", above, err, why)
	}
}

// The slots become those of the configuration, in any order, and what worked last stays.
func TestS166KeysAreReconciled(t *testing.T) {
	v := newVolume(t, key(0, "first"))
	v.create()
	v.settles(key(3, "second"), key(0, "first"))
	v.settles(key(3, "second")) // S-170: the rotation ends
	v.keys, v.kept = []Key{key(0, "first")}, nil
	v.refuses("the static key of slot 0")
	v.keys = []Key{key(3, "second")}
	v.settles(key(1, "second"), key(3, "third")) // it moves, and another key takes its slot
	v.settles(key(1, "second"), key(3, "fourth"))
	v.settles(key(31, "fifth"), key(1, "second"))
	v.settles(key(2, "sixth"), key(1, "seventh")) // one slot is free for the first of them
	v.keys, v.kept = nil, nil
	v.refuses("put them back")
}

// The last key that works stays, and nothing changes before one of the new keys works.
func TestWhatWorksStays(t *testing.T) {
	v := newVolume(t, key(0, "first"), key(1, "second"))
	v.create()
	good := v.keys
	for why, keys := range map[string][]Key{
		"leave one as it was":     {key(1, "none"), key(0, "none either")},
		"the machine has no UUID": {key(0, "first"), {Slot: 1, Kind: "nodeID", Err: errors.New("the machine has no UUID")}},
	} {
		v.keys, v.kept = keys, good
		if err := v.Settle(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v, want %q", err, why)
		}
		v.keys, v.kept = good, nil
		v.is()
	}
	// The keys are kept once one of them works, and before any goes.
	lost := errors.New("META is lost")
	v.keys, v.kept = []Key{key(1, "third"), key(2, "fourth")}, good
	v.Keep = func([]Key) error { return lost }
	if err := v.Settle(t.Context(), v.device); !errors.Is(err, lost) {
		t.Error(err)
	}
	v.keys, v.kept = append(good, key(2, "fourth")), nil
	v.is()
}

// While a slot changes, the power may go at any time: each state opens with what is kept.
func TestS170PowerCutInARotation(t *testing.T) {
	v := newVolume(t, key(0, "first"), key(1, "second"))
	v.create()
	old := v.keys
	v.keys = []Key{key(1, "third"), key(2, "fourth")}
	for cut := 20 * time.Millisecond; ; cut += cut / 2 {
		ctx, stop := context.WithTimeout(t.Context(), cut)
		err := v.Settle(ctx, v.device)
		stop()
		wanted := v.keys
		v.keys = nil // as before the configuration is known
		v.opens()
		v.keys = wanted
		if err == nil {
			break
		}
	}
	v.kept = nil
	v.is()
	v.keys = old
	v.refuses("the static key of slot 0")
}

// The real cryptsetup opens the volume with each key, and sees a header as its own.
func TestCryptsetupKnowsTheVolume(t *testing.T) {
	v := newVolume(t, key(0, "first"), key(7, "second"))
	v.Derivation = Derivation
	v.create()
	for _, k := range v.keys {
		cmd := exec.Command("cryptsetup", "open", "--test-passphrase", "--key-slot", fmt.Sprint(k.Slot), "--key-file", "-", v.device)
		cmd.Stdin = bytes.NewReader(k.Passphrase)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("slot %d: %v: %s", k.Slot, err, out)
		}
	}
	out, err := exec.Command("cryptsetup", "luksDump", v.device).CombinedOutput()
	if text := string(out); err != nil || strings.Count(text, "argon2id") != 2 || !strings.Contains(text, "aes-xts-plain64") || !strings.Contains(text, "EPHEMERAL") {
		t.Errorf("%v: %s", err, out)
	}
	raw, err := os.ReadFile(v.device)
	if err != nil || bytes.Contains(raw, []byte(mark)) || bytes.Contains(raw, []byte("second")) {
		t.Errorf("the disk has what it must not have: %v", err)
	}
}

// S-163: the power may go while the header is made. The journal has it made again, over whatever there is.
func TestPowerCutWhileItIsMade(t *testing.T) {
	v := newVolume(t, key(0, "first"), key(5, "second"))
	for cut := 20 * time.Millisecond; ; cut += cut / 2 {
		ctx, stop := context.WithTimeout(t.Context(), cut)
		err := v.Create(ctx, v.device)
		stop()
		if err == nil {
			break
		}
	}
	v.opens()
	v.keys = []Key{key(0, "third")}
	if err := v.Create(t.Context(), v.device); err != nil {
		t.Error(err)
	}
	v.opens()
	if slots, err := slotsIn(v.device); err != nil || len(slots) != 1 {
		t.Errorf("slots %v, %v", slots, err)
	}
}

// A damaged header is repaired from its second copy; without both, the volume is neither opened nor made again.
func TestDamagedHeader(t *testing.T) {
	v := newVolume(t, key(0, "first"))
	v.create()
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	v.damages(0, 4096)
	v.is()
	if !strings.Contains(v.log.String(), "is repaired from its copy") {
		t.Errorf("the log says %s", v.log.String())
	}
	if err := v.Close(); err != nil { // which repairs a header, too
		t.Fatal(err)
	}
	v.log.Reset()
	v.damages(0x8000, 4096)
	v.is()
	if !strings.Contains(v.log.String(), "is repaired from its copy: the second one") {
		t.Errorf("the log says %s", v.log.String())
	}
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	v.damages(0, 64<<10)
	if above, err := v.Open(t.Context(), v.device); err == nil && above != v.device {
		t.Errorf("opened %q", above)
	}
	if on, err := v.On(v.device); on || err != nil { // so the volume refuses what isn't blank
		t.Errorf("%v, %v", on, err)
	}
}

// damages writes over a part of the disk.
func (v *volume) damages(at, size int64) {
	v.t.Helper()
	f, err := os.OpenFile(v.device, os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteAt(bytes.Repeat([]byte{0x5a}, int(size)), at)
	}
	if err != nil {
		v.t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		v.t.Fatal(err)
	}
}

// S-163: what has content isn't encrypted, and is used as it is.
func TestContentIsNotEncrypted(t *testing.T) {
	v := newVolume(t, key(0, "first"))
	loopdisk.Run(t, "mke2fs", "-q", "-t", "ext4", v.device)
	if on, err := v.On(v.device); !on || err != nil {
		t.Errorf("a file system would be made anew: %v, %v", on, err)
	}
	if above, err := v.Open(t.Context(), v.device); above != v.device || err != nil {
		t.Errorf("opened %q, %v", above, err)
	}
	if err := v.Settle(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), "to have it encrypted: gbctl reset --system-labels-to-wipe EPHEMERAL --reboot") {
		t.Error(err)
	}
	v.keys = nil
	if err := v.Settle(t.Context(), v.device); err != nil {
		t.Error(err)
	}
}

// slotsIn are the slots with keys in the header of a device.
func slotsIn(device string) ([]int, error) {
	m, err := read(device)
	return m.slots(), err
}

//go:build kernel

package luks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A vault seals for a test: what it gives out is the passphrase with its bits turned.
type vault struct {
	down     error
	unsealed int
	later    bool // the next boot shows whether it gives passphrases back
}

func turned(text []byte) []byte {
	out := bytes.Clone(text)
	for i := range out {
		out[i] ^= 0xff
	}
	return out
}

func (v *vault) Seal(_ context.Context, passphrase []byte) ([]byte, error) {
	return turned(passphrase), v.down
}

func (v *vault) Unseal(_ context.Context, sealed []byte) ([]byte, error) {
	v.unsealed++
	return turned(sealed), v.down
}

func (v *vault) Lasts([]byte) bool { return !v.later }

func (v *vault) key(slot int) Key { return Key{Slot: slot, Kind: "kms", Sealer: v} }

// tokensAre checks that the header has tokens of these slots.
func (v *volume) tokensAre(slots ...string) {
	v.t.Helper()
	all, err := v.tokens(v.t.Context(), v.device)
	var got []string
	for _, t := range all {
		got = append(got, t.Slots...)
		if len(t.Slots) != 1 || t.Type != "garboard-kms" {
			v.t.Errorf("the token %+v", t)
		}
	}
	slices.Sort(got)
	if err != nil || !slices.Equal(got, slots) {
		v.t.Errorf("tokens of the slots %v, %v; want %v", got, err, slots)
	}
}

// A passphrase that nobody knows opens the volume, for who unseals it; keys of other kinds come first.
func TestSealedKeysAreReconciled(t *testing.T) {
	server := &vault{}
	v := newVolume(t, server.key(2))
	v.create()
	v.tokensAre("2")
	v.settles(server.key(2), key(0, "first"))
	server.unsealed = 0
	v.opens()
	if server.unsealed > 0 {
		t.Error("unsealed, although a passphrase is at hand")
	}
	v.settles(key(0, "first"))
	v.tokensAre()
	v.settles(key(0, "first"), server.key(1), server.key(3))
	v.settles(server.key(3), key(1, "second"))
	v.tokensAre("3")
	v.settles(server.key(3))
	out, err := exec.Command("cryptsetup", "luksDump", v.device).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "pbkdf2") || strings.Contains(string(out), "argon2id") {
		t.Errorf("%v: %s", err, out)
	}
	// Without its token, the key of a slot is made anew with another one.
	v.settles(server.key(3), key(0, "first"))
	tokens, err := v.tokens(t.Context(), v.device)
	for id := range tokens {
		err = errors.Join(err, v.run(t.Context(), nil, "token", "remove", "--token-id", strconv.Itoa(id), v.device))
	}
	if err != nil || len(tokens) != 1 {
		t.Fatalf("%d tokens, %v", len(tokens), err)
	}
	v.settles(server.key(3), key(0, "first"))
	v.tokensAre("3")
}

// While the server is down, other keys open the volume, and what is there stays.
func TestSealedAndDown(t *testing.T) {
	server := &vault{}
	v := newVolume(t, server.key(0), key(1, "first"))
	v.create()
	server.down = errors.New("the server is down")
	v.is()
	if err := v.Settle(t.Context(), v.device); !errors.Is(err, server.down) {
		t.Error(err)
	}
	v.keys = []Key{server.key(0)}
	v.kept = nil
	v.refuses("the kms key of slot 0: the server is down")
	server.down = nil
	v.opens()
	v.settles(server.key(0))
	for _, at := range []int64{0, 0x8000} { // either header with its tokens is enough
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
		v.damages(at, 4096)
		v.is()
	}
}

// Whenever the power goes, a slot has its token, or is made anew, and the passphrase is in no file.
func TestSealedPowerCuts(t *testing.T) {
	server := &vault{}
	v := newVolume(t, key(0, "first"))
	v.create()
	for i, cut := 0, 20*time.Millisecond; ; i, cut = i+1, cut+cut/3 {
		v.keys = []Key{server.key(1 + i%3), server.key(4), key(0, "first")}
		ctx, stop := context.WithTimeout(t.Context(), cut)
		err := v.Settle(ctx, v.device)
		stop()
		v.opens()
		if err == nil {
			break
		}
	}
	v.is()
	v.kept = nil
	v.keys = v.keys[:2]
	v.settles(v.keys...)
	v.tokensAre(fmt.Sprint(v.keys[0].Slot), "4")
	if raw, err := os.ReadFile(v.device); err != nil || !bytes.Contains(raw, []byte(`"type":"garboard-kms"`)) {
		t.Error(err)
	}
}

// A key that only a later boot shows takes no other's place before that, also if the power goes before it has its
// token.
func TestFormerKeysStayUntilTheNewOneLasts(t *testing.T) {
	server := &vault{later: true}
	v := newVolume(t, key(0, "first"), key(2, "second"))
	v.create()
	stays := func(slots string) {
		t.Helper()
		if err := v.Settle(t.Context(), v.device); err == nil || !strings.Contains(err.Error(), "the former keys (slot "+slots+") stay until a boot") {
			t.Error(err)
		}
		v.opens()
	}
	v.keys = []Key{server.key(1), server.key(2)}
	stays("2, 0")
	v.keys = []Key{server.key(1)}
	for range 2 { // the same boot
		stays("0, 2")
		v.tokensAre("1")
		if text := fmt.Sprint(v.kept); !strings.Contains(text, "static key of slot 0") || !strings.Contains(text, "static key of slot 2") {
			t.Errorf("kept are %s", text)
		}
	}
	server.down = errors.New("it gives nothing back")
	v.opens() // by the first one

	server.down = nil
	tokens, err := v.tokens(t.Context(), v.device)
	for id := range tokens {
		err = errors.Join(err, v.run(t.Context(), nil, "token", "remove", "--token-id", strconv.Itoa(id), v.device))
	}
	if err != nil {
		t.Fatal(err)
	}
	stays("0, 2")
	v.tokensAre("1")
	server.later = false
	v.settles(server.key(1))
	if len(v.kept) != 1 {
		t.Errorf("kept are %v", v.kept)
	}
}

// A slot has a token for each of two systems. What isn't unsealed now stays.
func TestSealAgain(t *testing.T) {
	server := &vault{}
	v := newVolume(t, server.key(0), server.key(1))
	v.create()
	first := "first"
	kinds := func(system string) func([]byte) bool {
		return func(sealed []byte) bool {
			return strings.HasPrefix(string(sealed), system) || system == first && len(sealed) > 0 && sealed[0] >= 0x80
		}
	}
	again := func(own, next string, anew func([]byte) ([]byte, error), want ...int) {
		t.Helper()
		if err := v.SealAgain(t.Context(), v.device, "kms", kinds(next), kinds(own), anew); err != nil {
			t.Error(err)
		}
		all, err := v.tokens(t.Context(), v.device)
		got := map[string]int{}
		for _, t := range all {
			got[t.Slots[0]]++
		}
		if err != nil || got["0"] != want[0] || got["1"] != want[1] {
			t.Errorf("from %s to %s: %v, %v", own, next, got, err)
		}
	}
	for _, own := range []string{"unsigned", first} { // neither its own nor new
		again(own, "second", func([]byte) ([]byte, error) { return nil, nil }, 1, 1)
	}
	again(first, "second", func(sealed []byte) ([]byte, error) { return append([]byte("second"), sealed...), nil }, 2, 2)
	again("second", first, nil, 2, 2)
	again("second", "third", func(sealed []byte) ([]byte, error) { return append([]byte("third"), sealed...), nil }, 2, 2)
	again("unsigned", "fourth", nil, 2, 2)
	again("third", "third", nil, 1, 1)
}

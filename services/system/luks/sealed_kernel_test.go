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

package esp

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/bootloader"
	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// variable sets one of a firmware.
func variable(t *testing.T, dir, name string, value []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), append([]byte(attributes), value...), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A signed system learns from the name of its entry what others learn from the command line, for each state of the
// slots, and its entry has no options.
func TestSelected(t *testing.T) {
	t.Parallel()
	sign, _, _ := owner.New(t)
	good, trying := boot.Slot{State: boot.SlotGood}, boot.Slot{State: boot.SlotTrying, Tries: 1}
	back := trying
	back.Back = true
	for name, slots := range map[string]boot.Slots{
		"a new machine":       {A: trying},
		"installed":           {A: good, Choice: "A"},
		"upgraded":            {A: good, B: trying, Choice: "A"},
		"the upgrade is good": {A: good, B: good, Choice: "B"},
		"rolled back":         {A: back, B: good, Choice: "B"},
		"a bad one":           {A: boot.Slot{State: boot.SlotBad}, B: good, Choice: "B"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := partition(t)
			if err := p.Start(slots); err != nil { // those of an unsigned system are there
				t.Fatal(err)
			}
			for _, slot := range boot.SlotNames {
				if err := os.WriteFile(p.System(slot), sign(uki.Image(t, "v1", "quiet")), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := p.Start(slots); err != nil {
				t.Fatal(err)
			}
			start, err := bootloader.SystemdBoot(os.DirFS(string(p)))
			if err != nil {
				t.Fatal(err)
			}
			if start.Line != "" {
				t.Errorf("options %s", start.Line)
			}
			firmware := t.TempDir()
			variable(t, firmware, loaderEntry, utf16le(start.Entry))
			want := boot.ParseCmdline(slots.Line(slots.Next())).Params
			if got := Selected(firmware); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: %v, want %v", start.Entry, got, want)
			}
			started, err := p.Started(slots.Next())
			if err != nil || started {
				t.Errorf("it was started: %v, %v", started, err)
			}
			if err := start.Count(string(p)); err != nil {
				t.Fatal(err)
			}
			if started, err = p.Started(slots.Next()); err != nil || started != slots.Unproven(slots.Next()) {
				t.Errorf("it was started: %v, %v: %v", started, err, p.files(t, entriesDir))
			}
			if err := p.Clear(slots.Next()); err != nil || strings.Contains(fmt.Sprint(p.files(t, entriesDir)), "garboard-"+strings.ToLower(slots.Next())) {
				t.Errorf("entries after Clear: %v, %v", p.files(t, entriesDir), err)
			}
		})
	}
}

// What isn't the entry of a slot says nothing.
func TestSelectedNothing(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "garboard.efi", "garboard-c.conf", "garboard-.conf", "auto-windows", strings.Repeat("garboard-a", 1000)} {
		dir := t.TempDir()
		variable(t, dir, loaderEntry, utf16le(id))
		if got := Selected(dir); got != nil {
			t.Errorf("%q: %v", id, got)
		}
	}
	if got := Selected(t.TempDir()); got != nil {
		t.Errorf("a BIOS: %v", got)
	}
	dir := t.TempDir()
	variable(t, dir, loaderEntry, utf16le("Garboard-B-other.conf")) // of a later release
	if got := Selected(dir); fmt.Sprint(got) != "[garboard.slot=B]" {
		t.Errorf("another kind: %v", got)
	}
}

// A firmware with Secure Boot starts what its db vouches for; others start all.
func TestAccepts(t *testing.T) {
	t.Parallel()
	sign, own, name := owner.New(t)
	_, stranger, _ := owner.New(t)
	plain := uki.Image(t, "v1", "quiet")
	signed := sign(plain)
	// messageDigest (RFC 5652, 11.2) becomes an attribute that nobody knows.
	unbound := bytes.Replace(signed, []byte("\x2a\x86\x48\x86\xf7\x0d\x01\x09\x04"), []byte("\x2a\x86\x48\x86\xf7\x0d\x01\x09\x7f"), 1)
	for what, c := range map[string]struct {
		state            string
		db, dbx, program []byte
		signer, err      string
	}{
		"off":             {SecureOff, nil, nil, plain, "", ""},
		"off, signed":     {SecureOff, nil, nil, signed, name, ""},
		"setup mode":      {SecureSetup, nil, nil, plain, "", ""},
		"on":              {SecureOn, append(bytes.Clone(stranger), own...), nil, signed, name, ""},
		"on, unsigned":    {SecureOn, own, nil, plain, "", "isn't signed for Secure Boot"},
		"on, stranger":    {SecureOn, stranger, nil, signed, "", "which the firmware's db doesn't have"},
		"on, no digest":   {SecureOn, own, nil, unbound, "", "of another hash"},
		"on, revoked":     {SecureOn, own, own, signed, "", "revoked the key"},
		"on, damaged db":  {SecureOn, own[:100], nil, signed, "", "the firmware's db"},
		"on, damaged dbx": {SecureOn, own, []byte("x"), signed, "", "the firmware's dbx"},
		"no program":      {SecureOn, own, nil, []byte("no program"), "", "no program for UEFI"},
	} {
		dir := t.TempDir()
		variable(t, dir, "BootCurrent"+global, []byte{0, 0})
		variable(t, dir, secureBoot, []byte{map[bool]byte{true: 1}[c.state == SecureOn]})
		variable(t, dir, setupMode, []byte{map[bool]byte{true: 1}[c.state == SecureSetup]})
		for file, value := range map[string][]byte{"db": c.db, "dbx": c.dbx} {
			if value != nil {
				variable(t, dir, file+security, value)
			}
		}
		if got := SecureBoot(dir); got != c.state {
			t.Errorf("%s: Secure Boot is %s", what, got)
		}
		by, err := Accepts(dir, bytes.NewReader(c.program), int64(len(c.program)))
		if by != c.signer || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %q, %v", what, by, err)
		}
	}
	if got := SecureBoot(t.TempDir()); got != SecureNone {
		t.Errorf("a BIOS: %s", got)
	}
}

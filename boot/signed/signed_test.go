package signed_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

var place = esp.Medium{Version: "v2.0.0", File: "efi.img", Offset: 512, From: "v1.0.0", Images: []string{"pause:1"}}

func files(m map[string][]byte) signed.Files {
	return signed.Files{Described: m[esp.MediumFile], Statement: m[signed.StatementFile], Signature: m[signed.SignatureFile]}
}

func keys(t *testing.T, makers ...string) (all []ed25519.PublicKey) {
	t.Helper()
	var text []byte
	for _, maker := range makers {
		text = append(text, signer.Public(t, maker)...)
	}
	all, err := signed.Keys(text)
	if err != nil || len(all) != len(makers) {
		t.Fatalf("%d keys, %v", len(all), err)
	}
	return all
}

// What was signed is believed, and the place on the medium is the medium's.
func TestSigned(t *testing.T) {
	t.Parallel()
	image := uki.Image(t, "v2.0.0", "quiet")
	f := files(signer.Signed(t, signer.Release, place, image))
	m, unsigned, err := signed.Policy{Keys: keys(t, "another", signer.Release), Floor: "v2.0.0"}.Judge(f)
	program := sha256.Sum256([]byte(uki.Program("v2.0.0")))
	if err != nil || unsigned != "" || m.File != "efi.img" || m.Offset != 512 || m.Size != int64(len(image)) || m.From != "v1.0.0" || m.Program != hex.EncodeToString(program[:]) {
		t.Errorf("%+v, %q, %v", m, unsigned, err)
	}
	// The medium says what it likes of what was signed.
	var lies esp.Medium
	if err := json.Unmarshal(f.Described, &lies); err != nil {
		t.Fatal(err)
	}
	lies.Version, lies.From, lies.Images, lies.Size, lies.Program, lies.Kernel = "v9.0.0", "", []string{"evil"}, 7, "00", "00"
	again := files(signer.Unsigned(t, lies))
	again.Statement, again.Signature = f.Statement, f.Signature
	if got, unsigned, err := (signed.Policy{Keys: keys(t, signer.Release)}).Judge(again); err != nil || unsigned != "" || got.Version != "v2.0.0" || got.From != "v1.0.0" || got.Size != m.Size || got.Program != m.Program || got.Images[0] != "pause:1" {
		t.Errorf("%+v, %q, %v", got, unsigned, err)
	}
}

// Each attack is refused with its reason, and taken where the configuration says so.
func TestAttacks(t *testing.T) {
	t.Parallel()
	image := uki.Image(t, "v2.0.0", "quiet")
	whole := func() signed.Files { return files(signer.Signed(t, signer.Release, place, image)) }
	changed := func(content []byte, at int) []byte {
		content = bytes.Clone(content)
		content[at] ^= 1
		return content
	}
	const none = "isn't signed by one of the 1 keys that this machine trusts, or was changed since"
	for name, c := range map[string]struct {
		change func(f *signed.Files)
		want   string
	}{
		"no signature":      {func(f *signed.Files) { f.Signature = nil }, "isn't signed"},
		"no statement":      {func(f *signed.Files) { f.Statement = nil }, "isn't signed"},
		"empty signature":   {func(f *signed.Files) { f.Signature = []byte{} }, "has a signature of 0 bytes"},
		"cut off":           {func(f *signed.Files) { f.Signature = f.Signature[:63] }, "has a signature of 63 bytes, which should have 64"},
		"longer":            {func(f *signed.Files) { f.Signature = append(f.Signature, 0) }, "has a signature of 65 bytes"},
		"zeros":             {func(f *signed.Files) { f.Signature = make([]byte, 64) }, none},
		"another key":       {func(f *signed.Files) { *f = files(signer.Signed(t, "another", place, image)) }, none},
		"statement cut off": {func(f *signed.Files) { f.Statement = f.Statement[:len(f.Statement)-1] }, none},
		"more said":         {func(f *signed.Files) { f.Statement = append(f.Statement, '\n') }, none},
		"another system": {func(f *signed.Files) {
			other := files(signer.Signed(t, "another", place, uki.Image(t, "v2.0.0", "quiet init=/evil")))
			f.Described = other.Described
		}, "has the signature of another system"},
		"something else was signed": {func(f *signed.Files) {
			f.Statement = []byte(`{"version": "v2.0.0", "size": 1}`)
			f.Signature = ed25519.Sign(signer.Key(signer.Release), f.Statement)
		}, "is signed, but what was signed describes no system"},
	} {
		f := whole()
		c.change(&f)
		_, _, err := signed.Policy{Keys: keys(t, signer.Release)}.Judge(f)
		if err == nil || !strings.Contains(err.Error(), "release v2.0.0 "+c.want) || !strings.Contains(err.Error(), "machine.install.unsigned") {
			t.Errorf("%s: %v", name, err)
		}
		if m, unsigned, err := (signed.Policy{Keys: keys(t, signer.Release), Unsigned: true}).Judge(f); err != nil || !strings.Contains(unsigned, c.want) || m.Version != "v2.0.0" {
			t.Errorf("%s, which the configuration takes: %q, %v", name, unsigned, err)
		}
	}
	f := whole()
	for at := range f.Statement {
		if _, _, err := (signed.Policy{Keys: keys(t, signer.Release)}).Judge(signed.Files{Described: f.Described, Statement: changed(f.Statement, at), Signature: f.Signature}); err == nil {
			t.Errorf("byte %d of the statement can be changed", at)
		}
	}
	for at := range f.Signature {
		if _, _, err := (signed.Policy{Keys: keys(t, signer.Release)}).Judge(signed.Files{Described: f.Described, Statement: f.Statement, Signature: changed(f.Signature, at)}); err == nil {
			t.Errorf("byte %d of the signature can be changed", at)
		}
	}
	if _, _, err := (signed.Policy{}).Judge(f); err == nil {
		t.Error("a machine without keys takes what somebody has signed")
	}
}

// Whoever may run unsigned systems still gets none for another machine, and no older one.
func TestArchitectureAndFloor(t *testing.T) {
	t.Parallel()
	image := uki.Image(t, "v2.0.0", "quiet")
	f := files(signer.Signed(t, signer.Release, place, image))
	trusted := signed.Policy{Keys: keys(t, signer.Release), Floor: "v2.0.1"}
	if _, _, err := trusted.Judge(f); err == nil || !strings.Contains(err.Error(), "release v2.0.0 is older than v2.0.1, which was healthy on this machine") {
		t.Errorf("%v", err)
	}
	trusted.Unsigned = true
	if _, _, err := trusted.Judge(f); err == nil {
		t.Error("to take unsigned systems is no leave for older ones")
	}
	trusted.Unsigned, trusted.Older = false, true
	if _, _, err := trusted.Judge(f); err != nil {
		t.Errorf("asked for: %v", err)
	}
	for _, floor := range []string{"", "v1.9.9", "v2.0.0-rc.1", "v2.0.0", "v2.0.0+build"} {
		if _, _, err := (signed.Policy{Keys: keys(t, signer.Release), Floor: floor}).Judge(f); err != nil {
			t.Errorf("floor %s: %v", floor, err)
		}
	}
	f.Statement = bytes.Replace(f.Statement, []byte(`"amd64"`), []byte(`"riscv64"`), 1)
	f.Signature = ed25519.Sign(signer.Key(signer.Release), f.Statement)
	for _, unsigned := range []bool{false, true} {
		if _, _, err := (signed.Policy{Keys: keys(t, signer.Release), Unsigned: unsigned}).Judge(f); err == nil || !strings.Contains(err.Error(), "release v2.0.0 is for machines with riscv64") {
			t.Errorf("%v", err)
		}
	}
}

// Only regular files are read, and not without end.
func TestOtherFilesInTheirPlace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range signer.Signed(t, signer.Release, place, uki.Image(t, "v2.0.0", "quiet")) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if f, err := signed.Read(root.FS()); err != nil || f.Statement == nil || len(f.Signature) != 64 {
		t.Fatalf("%+v, %v", f, err)
	}
	for _, name := range []string{esp.MediumFile, signed.StatementFile, signed.SignatureFile} {
		path := filepath.Join(dir, name)
		for what, put := range map[string]func() error{
			"a link":      func() error { return os.Symlink(path+".kept", path) },
			"a FIFO":      func() error { return syscall.Mkfifo(path, 0o600) },
			"a directory": func() error { return os.Mkdir(path, 0o700) },
			"no end":      func() error { return os.WriteFile(path, make([]byte, 1<<17), 0o600) },
		} {
			if err := os.Rename(path, path+".kept"); err != nil {
				t.Fatal(err)
			}
			if err := put(); err != nil {
				t.Fatal(err)
			}
			if _, err := signed.Read(root.FS()); err == nil {
				t.Errorf("%s in the place of %s is read", what, name)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".kept", path); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := signed.Read(fstest.MapFS{}); err == nil || !strings.Contains(err.Error(), fs.ErrNotExist.Error()) {
		t.Errorf("%v", err)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	ecdsa, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.EncodePublicKey(ecdsa)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := signed.Keys(append(signer.Public(t, signer.Release), public...)); err == nil {
		t.Error("a key of another kind is one")
	}
	if none, err := signed.Keys([]byte("# none\n")); err != nil || len(none) > 0 {
		t.Errorf("%v, %v", none, err)
	}
}

// People verify a release by hand as docs/releases.md says, and an owner can sign with other software.
func TestOpenSSLUnderstandsIt(t *testing.T) {
	t.Parallel()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("openssl isn't installed")
	}
	dir := t.TempDir()
	private, err := pki.EncodeKey(signer.Key(signer.Release))
	if err != nil {
		t.Fatal(err)
	}
	made := signer.Signed(t, signer.Release, place, uki.Image(t, "v2.0.0", "quiet"))
	made["release.pub"], made["release.key"] = signer.Public(t, signer.Release), private
	for name, content := range made {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) ([]byte, error) {
		cmd := exec.Command(openssl, args...)
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}
	verify := []string{"pkeyutl", "-verify", "-pubin", "-inkey", "release.pub", "-rawin", "-in", "release.json", "-sigfile", "release.sig"}
	if out, err := run(verify...); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := run("pkeyutl", "-sign", "-inkey", "release.key", "-rawin", "-in", "release.json", "-out", "again.sig"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if again, err := os.ReadFile(filepath.Join(dir, "again.sig")); err != nil || !bytes.Equal(again, made[signed.SignatureFile]) {
		t.Errorf("another signature for the same bytes: %x, %v", again, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "release.json"), append(made[signed.StatementFile], ' '), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(verify...); err == nil {
		t.Errorf("a changed statement is verified: %s", out)
	}
}

package secureboot

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/uki"
)

const (
	label = "the owner's; 100 %"
	pin   = "2468"
)

// softToken is a token of SoftHSM with keys of these names. Their IDs are 01, 02, and so on. The PIN is in the
// environment.
func softToken(t *testing.T, names ...string) (run func(args ...string)) {
	t.Helper()
	use, init := tool(t, "pkcs11-tool", "opensc"), tool(t, "softhsm2-util", "softhsm2")
	dir := t.TempDir()
	conf := filepath.Join(dir, "softhsm2.conf")
	if err := os.WriteFile(conf, []byte("directories.tokendir = "+dir+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOFTHSM2_CONF", conf)
	t.Setenv(pinVar, pin)
	if out, err := init("--init-token", "--free", "--label", label, "--pin", pin, "--so-pin", "13579"); err != nil {
		t.Fatalf("softhsm2-util: %v: %s", err, out)
	}
	run = func(args ...string) {
		t.Helper()
		all := append([]string{"--module", allModules, "--token-label", label, "--login", "--pin", "env:" + pinVar}, args...)
		if out, err := use(all...); err != nil {
			t.Fatalf("pkcs11-tool %s: %v: %s", args, err, out)
		}
	}
	for i, name := range names {
		run("--keypairgen", "--key-type", "rsa:2048", "--label", name, "--id", fmt.Sprintf("%02x", i+1))
	}
	return run
}

const tokenURI = "pkcs11:token=the%20owner's%3B%20100%20%25"

// An owner's keys in a token make and sign what keys in files do, and no file has a private key.
func TestKeysInToken(t *testing.T) {
	softToken(t, PK, KEK, DB, PCR)
	verify := tool(t, "sbverify", "sbsigntool")
	dir, k := madeWith(t, map[string]string{
		PK: tokenURI + ";object=PK", KEK: tokenURI + ";id=%02", DB: tokenURI + ";object=db;id=%03", PCR: tokenURI + ";object=pcr"})
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 11 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if content, err := os.ReadFile(file); err != nil || bytes.Contains(content, []byte("PRIVATE KEY")) {
			t.Errorf("%s has a private key, or: %v", file, err)
		}
	}
	signed, err := k.DB.Sign(uki.Image(t, "v1.0.0", "quiet"))
	program := filepath.Join(dir, "signed.efi")
	if err == nil {
		err = os.WriteFile(program, signed, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := verify("--cert", filepath.Join(dir, "db.crt"), program); err != nil || !strings.Contains(out, "Signature verification OK") {
		t.Errorf("sbverify: %v: %s", err, out)
	}
	if out, err := verify("--cert", filepath.Join(dir, "PK.crt"), program); err == nil {
		t.Errorf("sbverify with another certificate: %s", out)
	}
	verifyDB(t, dir, k)
	text, err := k.PolicySignature([]Section{{".linux", uki.Linux("6.12")}})
	if err != nil {
		t.Fatal(err)
	}
	var policies map[string][]signature
	if err := json.Unmarshal(text, &policies); err != nil {
		t.Fatal(err)
	}
	policy, err := hex.DecodeString(policies["sha256"][0].Policy)
	sum := sha256.Sum256(policy)
	if err != nil || rsa.VerifyPKCS1v15(k.PCR.Public().(*rsa.PublicKey), crypto.SHA256, sum[:], policies["sha256"][0].Signature) != nil {
		t.Errorf("%s isn't signed by the PCR key: %v", text, err)
	}
}

// Whatever is missing or wrong is named, with what to do.
func TestTokenRefuses(t *testing.T) {
	run := softToken(t, PK, DB)
	for label, ids := range map[string][]string{"curve": {"03"}, "twin": {"04", "05"}, "private only": {"06"}, "alias": {"02"}} {
		for _, id := range ids {
			run("--keypairgen", "--key-type", "EC:prime256v1", "--label", label, "--id", id)
		}
	}
	run("--delete-object", "--type", "pubkey", "--id", "06")
	pk, named := tokenURI+";object=PK", fmt.Sprintf("token %q, key %q: ", label, "PK")
	for name, c := range map[string]struct{ uri, pin, path, want string }{
		"good":             {uri: pk, pin: pin},
		"wrong PIN":        {uri: pk, pin: "1111", want: named + "the PIN is wrong: correct GARBOARD_PKCS11_PIN"},
		"no PIN":           {uri: pk, want: named + "no PIN: put it into the variable GARBOARD_PKCS11_PIN"},
		"no token":         {uri: "pkcs11:token=other;object=db", pin: pin, want: `token "other", key "db": there is no such token: plug it in`},
		"no key":           {uri: tokenURI + ";object=KEK", pin: pin, want: `must have one such key, with an ID of its own; it has "`},
		"another ID":       {uri: pk + ";id=%02", pin: pin, want: "must have one such key"},
		"two keys":         {uri: tokenURI + ";object=twin", pin: pin, want: "must have one such key"},
		"one of two":       {uri: tokenURI + ";object=twin;id=%05", pin: pin, want: "need an RSA key"},
		"no ID of its own": {uri: tokenURI + ";object=db", pin: pin, want: "must have one such key"},
		"no public key":    {uri: tokenURI + ";id=%06", pin: pin, want: `key "ID 06": the token lacks its public key`},
		"no module":        {uri: pk + "?module-path=/missing.so", pin: pin, want: named + "its module can't be loaded"},
		"no program":       {uri: pk, pin: pin, path: t.TempDir(), want: named + "the program pkcs11-tool, which signs with it, is missing: install Debian's package opensc"},
		"no name":          {uri: tokenURI, want: "must say which key it is"},
		"no scheme":        {uri: pk[len(uriScheme):], want: "must say which key it is"},
		"no token's name":  {uri: "pkcs11:object=db", want: "must say which key it is"},
		"a PIN in it":      {uri: pk + "?pin-value=2468", want: `"pin-value": must be one of token, object`},
		"twice":            {uri: pk + ";object=db", want: "and once"},
		"not well encoded": {uri: pk + "%zz", want: "invalid URL escape"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(pinVar, c.pin)
			if c.path != "" {
				t.Setenv("PATH", c.path)
			}
			_, err := openToken(c.uri)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// A token whose two halves don't belong together, or that went away, signs nothing.
func TestTokenSigns(t *testing.T) {
	run := softToken(t, DB, PCR)
	sum := sha256.Sum256(nil)
	key, err := openToken(tokenURI + ";object=db")
	if err != nil {
		t.Fatal(err)
	}
	run("--delete-object", "--type", "privkey", "--id", "01")
	if _, err := key.Sign(nil, sum[:], crypto.SHA256); err == nil || !strings.Contains(err.Error(), "Private key not found") {
		t.Errorf("without its key: %v", err)
	}
	key.(*tokenKey).id = "02"
	if _, err := key.Sign(nil, sum[:], crypto.SHA256); err == nil || !strings.Contains(err.Error(), "isn't that of the private one") {
		t.Errorf("with another key: %v", err)
	}
	if _, err := Generate(time.Now(), map[string]string{"dbx": tokenURI}); err == nil || !strings.Contains(err.Error(), "must be one of PK, KEK, db, pcr") {
		t.Errorf("a key dbx: %v", err)
	}
}

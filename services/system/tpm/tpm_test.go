package tpm

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/softtpm"
)

// system is one of a release, with its command line.
func system(release, cmdline string) []softtpm.Section {
	return []softtpm.Section{{Name: ".linux", Content: []byte(release)}, {Name: ".cmdline", Content: []byte(cmdline)}}
}

// booted is the TPM of a machine that was started anew.
func booted(m *softtpm.Machine, left string) *TPM {
	t := New(left)
	t.Open = m.Open
	return t
}

// A secret comes back to all systems of its owner, and to no others.
func TestSealedSecretOfAnotherBoot(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	_, other := owner.Keys(t)
	v1 := m.Boot("db of the owner", keys, system("v1", "quiet")...)
	secret := []byte("a passphrase of a disk, whose length is that of a real one......")
	sealed, err := booted(m, v1).Seal(secret, nil)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(sealed, secret) {
		t.Fatal("the secret can be read")
	}
	v2 := m.Boot("db of the owner", keys, system("v2", "loglevel=7")...)
	// signatureOf is what the stub leaves of one system, with the signature of another one.
	signatureOf := func(left, of string) string {
		text, err := os.ReadFile(filepath.Join(of, signatureFile))
		if err == nil {
			err = os.WriteFile(filepath.Join(left, signatureFile), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return left
	}
	for _, c := range []struct {
		name string
		boot func() string
		want string // of the error; "": it opens
	}{
		{"the same system", func() string { return m.Boot("db of the owner", keys, system("v1", "quiet")...) }, ""},
		{"another release", func() string { return m.Boot("db of the owner", keys, system("v2", "loglevel=7")...) }, ""},
		{"other keys of the firmware", func() string { return m.Boot("db of a thief", keys, system("v1", "quiet")...) }, "Secure Boot"},
		{"another owner", func() string { return m.Boot("db of the owner", other, system("v1", "quiet")...) }, "another PCR key"},
		{"a changed command line with old signatures", func() string {
			return signatureOf(m.Boot("db of the owner", keys, system("v1", "quiet init=/bin/sh")...), v1)
		}, "isn't the one that was signed"},
		{"a changed system with the signature of another release", func() string {
			return signatureOf(m.Boot("db of the owner", keys, system("v1", "quiet init=/bin/sh")...), v2)
		}, "isn't the one that was signed"},
		{"a signature of somebody else", func() string {
			left := m.Boot("db of the owner", other, system("v1", "init=/bin/sh")...)
			forge(t, left, keys)
			return left
		}, "TPM_RC_SIGNATURE"},
		{"arguments from outside", func() string {
			left := m.Boot("db of the owner", keys, system("v1", "quiet")...)
			m.Measure(argumentsPCR, "init=/bin/sh")
			return left
		}, "Secure Boot"},
		{"extensions from outside", func() string {
			left := m.Boot("db of the owner", keys, system("v1", "quiet")...)
			m.Measure(extensionPCR, "a sysext")
			return left
		}, "Secure Boot"},
		{"a system without a signature", func() string { m.Boot("db of the owner", keys); return t.TempDir() }, "isn't signed with a PCR key"},
	} {
		got, err := booted(m, c.boot()).Unseal(sealed)
		switch {
		case c.want == "" && (err != nil || !bytes.Equal(got, secret)):
			t.Errorf("%s: %q, %v", c.name, got, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || got != nil):
			t.Errorf("%s: %q, %v; want %s", c.name, got, err, c.want)
		}
	}
	another := softtpm.New(t)
	if got, err := booted(another, another.Boot("db of the owner", keys, system("v1", "quiet")...)).Unseal(sealed); err == nil || !strings.Contains(err.Error(), "another TPM") {
		t.Errorf("another machine: %q, %v", got, err)
	}
}

// forge says of signatures that a key has made them.
func forge(t *testing.T, left string, as *softtpm.Owner) {
	t.Helper()
	var all, real map[string][]map[string]any
	text, err := os.ReadFile(filepath.Join(left, signatureFile))
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	own, err := as.PolicySignature(nil)
	if err == nil {
		err = json.Unmarshal(own, &real)
	}
	if err != nil {
		t.Fatal(err)
	}
	all["sha256"][0]["pkfp"] = real["sha256"][0]["pkfp"]
	if text, err = json.Marshal(all); err == nil {
		err = os.WriteFile(filepath.Join(left, signatureFile), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// After Close, nothing comes back until the next boot, but new secrets can be sealed for it.
func TestClosed(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	boot := func() *TPM { return booted(m, m.Boot("db", keys, system("v1", "quiet")...)) }
	tpm := boot()
	first, err := tpm.Seal([]byte("first"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := tpm.Unseal(first); string(got) != "first" {
		t.Fatalf("%q, %v", got, err)
	}
	if err := tpm.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := tpm.Seal([]byte("second"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, sealed := range [][]byte{first, second} {
		if got, err := tpm.Unseal(sealed); err == nil || !strings.Contains(err.Error(), "the disks were opened before") {
			t.Errorf("%q, %v", got, err)
		}
	}
	tpm = boot()
	for i, sealed := range [][]byte{first, second} {
		if got, err := tpm.Unseal(sealed); string(got) != []string{"first", "second"}[i] {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// busy is a TPM into which the kernel measures something just before a secret comes back.
type busy struct {
	transport.TPMCloser
	measure func()
}

func (b busy) Send(command []byte) ([]byte, error) {
	switch tpm2.TPMCC(binary.BigEndian.Uint32(command[6:])) {
	case tpm2.TPMCCUnseal, tpm2.TPMCCPolicyAuthorize: // the policy is proven to its end, or in part
		b.measure()
	}
	return b.TPMCloser.Send(command)
}

// The kernel measures modules into PCR 10 while Secure Boot is on.
func TestMeasuredMeanwhile(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	tpm := booted(m, m.Boot("db", keys, system("v1", "quiet")...))
	sealed, err := tpm.Seal([]byte("x"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		modules int
		want    string // of the error
	}{{0, ""}, {1, ""}, {2, ""}, {9, ""}, {1000, "TPM_RC_PCR_CHANGED"}} {
		left := c.modules
		tpm.Open = func() (transport.TPMCloser, error) {
			c, err := m.Open()
			return busy{c, func() {
				if left--; left >= 0 {
					m.Measure(10, "a module")
				}
			}}, err
		}
		got, err := tpm.Unseal(sealed)
		if c.want == "" && string(got) != "x" || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%d modules: %q, %v", c.modules, got, err)
		}
	}
}

// Without a measured boot, nothing is sealed: it would open for everybody, or never again.
func TestUnusable(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	left := m.Boot("db", keys)
	for _, c := range []struct{ name, left, want string }{
		{"nothing is measured into PCR 11", left, "measures nothing into PCR 11"},
		{"no signature", t.TempDir(), "isn't signed with a PCR key"},
	} {
		if _, err := booted(m, c.left).Seal([]byte("x"), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	none := New(left)
	none.Open = func() (_ transport.TPMCloser, err error) {
		_, err = os.Open(filepath.Join(t.TempDir(), "none"))
		return nil, err
	}
	if err := none.Usable(); err == nil || !strings.Contains(err.Error(), "no TPM 2.0") {
		t.Error(err)
	}
}

// What a disk says of itself is no program's to believe.
func TestDamagedSecret(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	tpm := booted(m, m.Boot("db", keys, system("v1", "quiet")...))
	good, err := tpm.Seal([]byte("x"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var s sealed
	if err := json.Unmarshal(good, &s); err != nil {
		t.Fatal(err)
	}
	tiny := []byte{0x30, 6, 2, 1, 3, 2, 1, 3} // an RSA key of two bits
	if _, err := x509.ParsePKCS1PublicKey(tiny); err != nil {
		t.Logf("refused by crypto/x509: %v", err)
	}
	for _, change := range []func(*sealed){
		func(s *sealed) { s.Public = nil }, func(s *sealed) { s.Private = nil }, func(s *sealed) { s.Key = nil },
		func(s *sealed) { s.Public = s.Public[:7] }, func(s *sealed) { s.Private[9] ^= 1 }, func(s *sealed) { s.Key = tiny },
		func(s *sealed) { s.Parent = nil }, func(s *sealed) { s.Public = bytes.Repeat([]byte{0xff}, 100) },
	} {
		bad := s
		bad.Private = bytes.Clone(s.Private)
		change(&bad)
		text, err := json.Marshal(bad)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tpm.Unseal(text); err == nil {
			t.Errorf("%s: %q", text, got)
		}
	}
	if got, err := tpm.Unseal(good); string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
}

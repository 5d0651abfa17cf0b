package secureboot

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/authenticode"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// made are the files of one owner, in a directory.
func made(t *testing.T, added ...*x509.Certificate) (dir string, k *Keys) {
	t.Helper()
	return madeWith(t, nil, added...)
}

// madeWith are those of an owner who has keys in tokens.
func madeWith(t *testing.T, tokens map[string]string, added ...*x509.Certificate) (dir string, k *Keys) {
	t.Helper()
	dir = t.TempDir()
	files, err := Generate(time.Now(), tokens, added...)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if k, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	return dir, k
}

// tool returns a program of Debian, or skips the test.
func tool(t *testing.T, name, pack string) func(args ...string) (string, error) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("install Debian's package %s: %v", pack, err)
	}
	return func(args ...string) (string, error) {
		ctx, cancel := eventually.Context(t.Context(), 20*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
		return string(out), err
	}
}

func read(t *testing.T, program []byte) authenticode.Image {
	t.Helper()
	image, err := authenticode.Read(bytes.NewReader(program), int64(len(program)))
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// A firmware with the owner's db starts what the owner has signed, as it is, and nothing else.
func TestSign(t *testing.T) {
	t.Parallel()
	_, k := made(t)
	_, other := made(t)
	db, err := authenticode.ParseDatabase(List(other.DB.Cert, k.DB.Cert))
	if err != nil {
		t.Fatal(err)
	}
	program := uki.Image(t, "v1.0.0", "quiet")
	signed, err := k.DB.Sign(program)
	if err != nil {
		t.Fatal(err)
	}
	if name, err := authenticode.Accept(read(t, signed), db, authenticode.Database{}); name != k.DB.Cert.Subject.CommonName || err != nil {
		t.Errorf("signed: %q, %v", name, err)
	}
	if again, err := k.DB.Sign(signed); err != nil || !bytes.Equal(again, signed) {
		t.Errorf("signed twice, it has %d bytes, and once %d: %v", len(again), len(signed), err)
	}
	changed := bytes.Clone(signed)
	changed[len(program)-600] ^= 1
	foreign, err := authenticode.ParseDatabase(List(other.DB.Cert))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		program []byte
		db, dbx authenticode.Database
		want    string
	}{
		"unsigned":       {program, db, authenticode.Database{}, "isn't signed for Secure Boot"},
		"changed":        {changed, db, authenticode.Database{}, "was changed since"},
		"other owner":    {signed, foreign, authenticode.Database{}, "which the firmware's db doesn't have"},
		"revoked":        {signed, db, authenticode.Database{Certificates: db.Certificates[1:]}, "has revoked the key"},
		"revoked by sum": {signed, db, authenticode.Database{Hashes: [][]byte{read(t, signed).Hash}}, "has revoked it"},
	} {
		if _, err := authenticode.Accept(read(t, c.program), c.db, c.dbx); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	apart := bytes.Clone(program)
	binary.LittleEndian.PutUint32(apart[0x148+20:], 1024+512) // the place of the first section
	if _, err := k.DB.Sign(apart); err == nil || !strings.Contains(err.Error(), ".osrel doesn't follow") {
		t.Errorf("a gap: %v", err)
	}
	// Each byte of the signature may be anything.
	for at := len(signed) - 1500; at < len(signed); at++ {
		broken := bytes.Clone(signed)
		broken[at] ^= 0x5a
		if image, err := authenticode.Read(bytes.NewReader(broken), int64(len(broken))); err == nil {
			_, _ = authenticode.Accept(image, db, db)
		}
	}
	for size := range 2000 {
		_, _ = authenticode.Read(bytes.NewReader(signed[:size]), int64(size))
		_, _ = authenticode.ParseDatabase(List(k.DB.Cert)[:min(size, 800)])
	}
}

// Debian's sbverify accepts what was signed here, and what its sbsign has signed is accepted here.
func TestSignAsSbsigntool(t *testing.T) {
	t.Parallel()
	verify, sign, list := tool(t, "sbverify", "sbsigntool"), tool(t, "sbsign", "sbsigntool"), tool(t, "sbsiglist", "sbsigntool")
	dir, k := made(t)
	program, signed, theirs := filepath.Join(dir, "program.efi"), filepath.Join(dir, "signed.efi"), filepath.Join(dir, "theirs.efi")
	content := uki.Image(t, "v1.0.0", "quiet")
	ours, err := k.DB.Sign(content)
	if err == nil {
		err = os.WriteFile(program, content, 0o600)
	}
	if err == nil {
		err = os.WriteFile(signed, ours, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	crt := filepath.Join(dir, "db.crt")
	if out, err := verify("--cert", crt, signed); err != nil || !strings.Contains(out, "Signature verification OK") {
		t.Errorf("sbverify: %v: %s", err, out)
	}
	if out, err := verify("--cert", filepath.Join(dir, "KEK.crt"), signed); err == nil {
		t.Errorf("sbverify with another certificate: %s", out)
	}
	if out, err := sign("--key", filepath.Join(dir, "db.key"), "--cert", crt, "--output", theirs, program); err != nil {
		t.Fatalf("sbsign: %v: %s", err, out)
	}
	image, err := os.ReadFile(theirs)
	if err != nil {
		t.Fatal(err)
	}
	if name, err := authenticode.Accept(read(t, image), authenticode.Database{Certificates: []*x509.Certificate{k.DB.Cert}}, authenticode.Database{}); err != nil {
		t.Errorf("signed by sbsign: %q, %v", name, err)
	}
	der, esl := filepath.Join(dir, "db.der"), filepath.Join(dir, "db.esl")
	if err := os.WriteFile(der, k.DB.Cert.Raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := list("--owner", "62726167-616f-6472-0000-000000000000", "--type", "x509", "--output", esl, der); err != nil {
		t.Fatalf("sbsiglist: %v: %s", err, out)
	}
	if want, err := os.ReadFile(esl); err != nil || !bytes.Equal(want, List(k.DB.Cert)) {
		t.Errorf("a list of signatures is %x, and sbsiglist makes %x, %v", List(k.DB.Cert), want, err)
	}
}

// The policy and its signature are those of systemd-measure(1), which knows no .uname and .sbat in Debian 12.
func TestPolicyAsSystemdMeasure(t *testing.T) {
	t.Parallel()
	path := "/usr/lib/systemd/systemd-measure"
	measure := tool(t, path, "systemd")
	dir, k := made(t)
	key, err := k.PolicyKey()
	if err != nil {
		t.Fatal(err)
	}
	sections := []Section{{".cmdline", []byte("quiet")}, {".pcrpkey", key}, {".linux", uki.Linux("6.12")}, {".initrd", []byte("archive")}, {".osrel", []byte("ID=garboard\n")}}
	var args []string
	for _, s := range sections {
		file := filepath.Join(dir, s.Name)
		if err := os.WriteFile(file, s.Content, 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--"+s.Name[1:]+"="+file)
	}
	args = append(args, "--bank=SHA256", "--phase=", "--json=short")
	out, err := measure(append(args, "calculate")...)
	if pcr := PCR11(sections); err != nil || !strings.Contains(out, hex.EncodeToString(pcr[:])) {
		t.Errorf("PCR 11 is %x, and systemd-measure says %v: %s", pcr, err, out)
	}
	ours, err := k.PolicySignature(sections)
	if err != nil {
		t.Fatal(err)
	}
	// it asks a TPM for the policy
	swtpm, err := exec.LookPath("swtpm")
	if err != nil {
		t.Skipf("install Debian's packages swtpm and libtss2-tcti-swtpm0: %v", err)
	}
	port := freeport.Find(t).Port() // its control channel has the next one, for libtss2
	tpm := exec.Command(swtpm, "socket", "--tpm2", "--tpmstate", "dir="+t.TempDir(), "--flags", "not-need-init,startup-clear",
		"--server", fmt.Sprintf("type=tcp,port=%d", port), "--ctrl", fmt.Sprintf("type=tcp,port=%d", port+1))
	if err := tpm.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = tpm.Process.Kill(), tpm.Wait() })
	eventually.That(t, 10*time.Second, "systemd-measure signs", func() error {
		out, err = measure(append(args, "--private-key="+filepath.Join(dir, "pcr.key"), "--public-key="+filepath.Join(dir, "pcr.pub"),
			fmt.Sprintf("--tpm2-device=swtpm:port=%d", port), "sign")...)
		return err
	})
	var have, want map[string][]signature
	if err := json.Unmarshal(ours, &have); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &want); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	a, b := have["sha256"], want["sha256"]
	if len(a) != 1 || len(b) != 1 || a[0].Fingerprint != b[0].Fingerprint || a[0].Policy != b[0].Policy || !bytes.Equal(a[0].Signature, b[0].Signature) {
		t.Errorf("%s\nsystemd-measure: %s", ours, out)
	}
}

// What is enrolled is a value with its signature: openssl verifies it.
func TestVariable(t *testing.T) {
	t.Parallel()
	dir, k := made(t)
	verifyDB(t, dir, k)
}

// verifyDB has openssl verify db.auth.
func verifyDB(t *testing.T, dir string, k *Keys) {
	t.Helper()
	openssl := tool(t, "openssl", "openssl")
	auth := k.Enrolment["db.auth"]
	length := binary.LittleEndian.Uint32(auth[16:])
	signed, value := auth[40:16+length], auth[16+length:]
	if !bytes.Equal(value, List(k.DB.Cert)) {
		t.Errorf("db.auth ends with %x", value)
	}
	message := append([]byte("d\x00b\x00"+imageSafety+"\x27\x00\x00\x00"), auth[:16]...)
	// openssl wants a ContentInfo around it
	oid := []byte("\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02")
	inner := append([]byte{0xa0, 0x82, byte(len(signed) >> 8), byte(len(signed))}, signed...)
	size := len(oid) + len(inner)
	wrapped := append(append([]byte{0x30, 0x82, byte(size >> 8), byte(size)}, oid...), inner...)
	for name, content := range map[string][]byte{"signature": wrapped, "message": append(message, value...)} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := openssl("smime", "-verify", "-binary", "-inform", "DER", "-in", filepath.Join(dir, "signature"), "-content", filepath.Join(dir, "message"),
		"-certfile", filepath.Join(dir, "KEK.crt"), "-noverify", "-nointern", "-out", os.DevNull)
	if err != nil {
		t.Errorf("openssl: %v: %s", err, out)
	}
}

// Keys that don't belong together, or that firmware doesn't know, are refused.
func TestOpen(t *testing.T) {
	t.Parallel()
	dir, _ := made(t)
	other, _ := made(t)
	for name, want := range map[string]string{"db.crt": "is not the certificate of", "db.key": "is not the certificate of", "pcr.key": ""} {
		mixed := t.TempDir()
		if err := os.CopyFS(mixed, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(filepath.Join(other, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(mixed, name), content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(mixed); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("another %s: %v", name, err)
		}
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "db.key") {
		t.Errorf("no keys: %v", err)
	}
}

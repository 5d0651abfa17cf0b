package media

import (
	"bytes"
	"debug/pe"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"

	"github.com/garboard-os/garboard/boot/authenticode"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// secure are options of a system that is signed.
func secure(t *testing.T) Options {
	t.Helper()
	o := options(t)
	_, o.Secure = owner.Keys(t)
	if err := os.WriteFile(filepath.Join(o.Loader.Disk, esp.SystemdBoot), uki.Stub(t, 1024), 0o600); err != nil {
		t.Fatal(err)
	}
	return o
}

// signedBy is who has signed a program.
func signedBy(t *testing.T, program []byte) string {
	t.Helper()
	image, err := authenticode.Read(bytes.NewReader(program), int64(len(program)))
	if err != nil {
		t.Fatal(err)
	}
	return image.Signer()
}

// A signed system has the owner's signature, and says what a TPM will measure. Its command line can't change.
func TestSignedSystem(t *testing.T) {
	t.Parallel()
	o := secure(t)
	o.Loader.Stub = append(o.Loader.Stub, bytes.Repeat([]byte("symbols"), 100)...) // as that of Debian 12 has
	image := read(t, build(t, o, UKI))
	system, err := ReadSystem(image)
	if err != nil || !system.Secure || system.Version != o.Version || !strings.Contains(system.Cmdline, "console=ttyS1") {
		t.Errorf("%+v, %v", system.Version, err)
	}
	if got := signedBy(t, image); got != o.Secure.DB.Cert.Subject.CommonName {
		t.Errorf("signed by %q", got)
	}
	parts, err := pe.NewFile(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	section := func(name string) []byte {
		content, err := parts.Section(name).Data()
		if err != nil {
			t.Fatal(err)
		}
		return content[:parts.Section(name).VirtualSize]
	}
	var policy map[string][]struct{ Pol, Sig string }
	if err := json.Unmarshal(section(esp.SectionPolicySignature), &policy); err != nil || len(policy["sha256"]) != 1 || len(policy["sha256"][0].Pol) != 64 {
		t.Errorf("%s: %v", section(esp.SectionPolicySignature), err)
	}
	if key, err := o.Secure.PolicyKey(); err != nil || !bytes.Equal(section(esp.SectionPolicyKey), key) {
		t.Errorf("%s, %v", section(esp.SectionPolicyKey), err)
	} else if read, err := esp.ReadImage(bytes.NewReader(image), int64(len(image))); err != nil || read.PolicyKey != strings.TrimSpace(string(key)) && read.PolicyKey != string(key) {
		t.Errorf("a machine reads %q: %v", read.PolicyKey, err)
	}
	if again := read(t, build(t, o, UKI)); !bytes.Equal(again, image) {
		t.Error("the same system isn't the same twice")
	}
	files := NetworkFiles{UKIFile: image}
	if err := files.AddArgs("debug"); err == nil || !strings.Contains(err.Error(), "can't change") {
		t.Errorf("another argument: %v", err)
	}
}

// A medium starts a signed boot loader, which enrols the owner's keys when it is asked to, and starts the system.
func TestMediumEnrols(t *testing.T) {
	t.Parallel()
	o := secure(t)
	iso := openISO(t, build(t, o, ISO))
	partition := filepath.Join(t.TempDir(), "efi")
	if err := os.WriteFile(partition, content(t, iso, "/"+efiFile), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(partition)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	fs, err := fat32.Read(file.New(f, true), info.Size(), 0, 512)
	if err != nil {
		t.Fatal(err)
	}
	in := func(path string) []byte { return content(t, fs, path) }
	boots, err := o.enrolling(read(t, build(t, o, UKI)))
	if err != nil {
		t.Fatal(err)
	}
	signed := 0
	for _, f := range boots {
		// go-diskfs reads to the end of the last sector
		if got := in(f.path); !bytes.HasPrefix(got, f.content) {
			t.Errorf("%s has %d bytes, want %d", f.path, len(got), len(f.content))
		}
		if strings.EqualFold(filepath.Ext(f.path), ".efi") && signedBy(t, f.content) == o.Secure.DB.Cert.Subject.CommonName {
			signed++
		}
	}
	if signed != 2 || len(boots) != 3+len(o.Secure.Enrolment) {
		t.Errorf("%d of %d files are signed", signed, len(boots))
	}
	if text := string(in("/loader/loader.conf")); !strings.Contains(text, "secure-boot-enroll manual\n") {
		t.Error(text)
	}
	if script := string(content(t, iso, "/garboard.cfg")); !strings.Contains(script, "(efi)"+mediumSystem) {
		t.Error(script)
	}
}

package slots

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

// secured turns Secure Boot of the machine's firmware on, with this db.
func (m *rig) secured(db []byte) {
	m.t.Helper()
	must(m.t, os.MkdirAll(filepath.Join(m.dir, "firmware"), 0o700))
	const global = "-8be4df61-93ca-11d2-aa0d-00e098032b8c"
	for name, value := range map[string]string{"SecureBoot" + global: "\x01", "db-d719b2cb-3d3a-4596-a3bc-dad00e67656f": string(db)} {
		m.put("firmware/"+name, []byte("\x06\x00\x00\x00"+value))
	}
}

// insertSigned puts a medium with a signed system into the machine, whose boot loader is signed, too.
func (m *rig) insertSigned(version string, sign func([]byte) []byte) {
	m.t.Helper()
	image := sign(uki.Image(m.t, version, "quiet mine=1"))
	m.lay(signer.Signed(m.t, signer.Release, esp.Medium{Version: version, File: "efi.img"}, image))
	m.put("medium/efi.img", image)
	m.put("loaders/"+esp.SystemdBoot, sign(uki.Stub(m.t, 1024)))
}

// With Secure Boot, a system that the firmware wouldn't start is refused before anything is written, and what the
// owner has signed is installed, and upgraded to, without a command line.
func TestSecureBoot(t *testing.T) {
	t.Parallel()
	sign, db, name := owner.New(t)
	stranger, _, _ := owner.New(t)
	m := newMachine(t)
	m.secured(db)
	m.insert("v1")
	m.refuses(m.boot(""), "isn't signed for Secure Boot")
	m.insertSigned("v1", stranger)
	m.refuses(m.boot(""), "which the firmware's db doesn't have")
	if got := m.entries(); got != "" {
		t.Errorf("entries: %s", got)
	}
	m.insertSigned("v1", sign)
	must(t, m.write(m.boot("")))
	if got := m.entries(); got != "garboard-a-alone+1.conf" {
		t.Errorf("entries: %s", got)
	}
	s := m.boot("A")
	must(t, s.Prove(t.Context(), "healthy"))
	s.secure(t.Context())
	status, err := SecurityStatuses.Get(s.o.Store, "machine")
	must(t, err)
	if got := status.Spec; got != (Security{SecureBoot: esp.SecureOn, Lockdown: "integrity", Signer: name}) {
		t.Errorf("%+v", got)
	}
	m.insert("v2")
	m.refuses(s, "isn't signed for Secure Boot")
	m.insertSigned("v2", sign)
	must(t, m.write(s))
	if got := m.entries(); got != "garboard-a.conf garboard-b-trial+1.conf" {
		t.Errorf("entries: %s", got)
	}
	// A boot loader that the firmware wouldn't start doesn't replace one that it starts.
	before, err := os.ReadFile(filepath.Join(m.dir, "efi/EFI/BOOT/BOOTX64.EFI"))
	must(t, err)
	m.put("loaders/"+esp.SystemdBoot, uki.Stub(t, 1024))
	must(t, m.boot("B").Prove(t.Context(), "healthy"))
	if after, err := os.ReadFile(filepath.Join(m.dir, "efi/EFI/BOOT/BOOTX64.EFI")); err != nil || string(after) != string(before) {
		t.Errorf("the boot loader was replaced (%v)", err)
	}
}

func (m *rig) refuses(s *Slots, want string) {
	m.t.Helper()
	if err := m.write(s); err == nil || !strings.Contains(err.Error(), want) {
		m.t.Errorf("%v, want %q", err, want)
	}
}

// A signed system has its own kernel arguments: others of the configuration are refused, with the reason.
func TestArgumentsOfASignedSystem(t *testing.T) {
	t.Parallel()
	sign, _, _ := owner.New(t)
	m := newMachine(t)
	m.insertSigned("v1", sign)
	m.config = &config.Config{}
	m.config.Machine.Install.ExtraKernelArgs = []string{"mine=1", "theirs=1"}
	m.refuses(m.boot(""), "make it with theirs=1")
	m.config.Machine.Install.ExtraKernelArgs = []string{"mine=1"}
	must(t, m.write(m.boot("")))
}

// Without Secure Boot, nothing is refused, and the status says what is.
func TestSecurityWithout(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.insert("v1")
	must(t, m.write(m.boot("")))
	s := m.boot("A")
	s.o.lockdown = filepath.Join(m.dir, "none")
	s.secure(t.Context())
	status, err := SecurityStatuses.Get(s.o.Store, "machine")
	must(t, err)
	if got := status.Spec; got != (Security{SecureBoot: esp.SecureNone, Lockdown: "none"}) {
		t.Errorf("%+v", got)
	}
	must(t, os.Remove(filepath.Join(m.dir, "efi/EFI/garboard/A.efi")))
	s.secure(t.Context())
	if status, err = SecurityStatuses.Get(s.o.Store, "machine"); err != nil || !strings.Contains(status.Spec.Problem, "A.efi") {
		t.Errorf("%+v, %v", status.Spec, err)
	}
}

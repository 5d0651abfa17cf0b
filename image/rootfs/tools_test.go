package rootfs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The build machine's own tree stands in for unpacked packages: a dynamically linked program comes with all that it loads, and starts
// with nothing else in sight of the dynamic linker.
func TestToolsComeWithTheirLibraries(t *testing.T) {
	dir := t.TempDir()
	if err := takeTools("/", dir, []string{"dpkg-deb", "libgcc_s.so.1"}); err != nil {
		t.Fatal(err)
	}
	linker := filepath.Join(dir, "usr/lib64/ld-linux-x86-64.so.2")
	libraries := filepath.Join(dir, libraryFolder)
	program := filepath.Join(dir, "usr/sbin/dpkg-deb")
	out, err := exec.Command(linker, "--library-path", libraries, "--list", program).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "not found") || strings.Contains(line, "=> /lib") || strings.Contains(line, "=> /usr") {
			t.Errorf("not from the tree: %s", line)
		}
	}
	if out, err := exec.Command(linker, "--library-path", libraries, program, "--version").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestToolsMissing(t *testing.T) {
	if err := takeTools(t.TempDir(), t.TempDir(), []string{"mkfs.xfs"}); err == nil || !strings.Contains(err.Error(), "mkfs.xfs") {
		t.Errorf("error %v doesn't name the tool", err)
	}
}

func TestAuthorities(t *testing.T) {
	folder, bundle := t.TempDir(), filepath.Join(t.TempDir(), caBundle)
	const certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for _, name := range []string{"b.crt", "a.crt", "readme"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(certificate), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := takeAuthorities(folder, bundle); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(bundle); err != nil || string(got) != certificate+certificate {
		t.Errorf("bundle: %q, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(folder, "c.crt"), []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := takeAuthorities(folder, filepath.Join(t.TempDir(), caBundle)); err == nil || !strings.Contains(err.Error(), "c.crt") {
		t.Errorf("error %v doesn't name the file", err)
	}
}

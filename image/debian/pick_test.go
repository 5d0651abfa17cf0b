package debian

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPickerTakesWhatAProgramNeeds(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	gcc := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "gcc", args...).CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v: %s", err, out)
		}
	}
	for _, dir := range []string{"usr/sbin", libraryFolder, "etc"} {
		if err := os.MkdirAll(filepath.Join(from, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	source := filepath.Join(t.TempDir(), "x.c")
	if err := os.WriteFile(source, []byte("int answer(void) { return 42; }\nint main(void) { return answer(); }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	real := filepath.Join(from, libraryFolder, "libanswer.so.1.2.3")
	gcc("-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libanswer.so.1", "-o", real, source)
	if err := os.Symlink("libanswer.so.1.2.3", filepath.Join(from, libraryFolder, "libanswer.so.1")); err != nil {
		t.Fatal(err)
	}
	gcc("-nostdlib", "-Wl,--no-as-needed", "-Wl,-e,main", "-Wl,-dynamic-linker,/lib64/ld-linux-none.so", "-o", filepath.Join(from, "usr/sbin", "asker"), source, real)

	p := newPicker(from, to)
	asker := Tool{Package: "x", Name: "asker", Links: []string{"alias"}}
	if err := p.take(asker); err == nil || !strings.Contains(err.Error(), "ld-linux-none.so") {
		t.Fatalf("the missing dynamic linker isn't named: %v", err)
	}
	gcc("-shared", "-fPIC", "-nostdlib", "-o", filepath.Join(from, libraryFolder, "ld-linux-none.so"), source)
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	p = newPicker(from, to)
	if err := p.take(asker); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := filepath.WalkDir(to, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		got = append(got, strings.TrimPrefix(path, to+"/"))
		return nil
	})
	want := []string{libraryFolder + "/ld-linux-none.so", libraryFolder + "/libanswer.so.1", "usr/lib64/ld-linux-none.so", "usr/sbin/alias", "usr/sbin/asker"}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v %s", err, diff)
	}
	if err := p.take(Tool{Package: "x", Name: "absent"}); err == nil {
		t.Error("a tool that no package has was taken")
	}
}

// The build machine's own tree stands in for unpacked packages: a dynamically linked program comes with all that it
// loads, and starts with nothing else in sight of the dynamic linker.
func TestToolsComeWithTheirLibraries(t *testing.T) {
	dir := t.TempDir()
	p := newPicker("/", dir)
	for _, name := range []string{"dpkg-deb", "libgcc_s.so.1"} {
		if err := p.take(Tool{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	linker := filepath.Join(dir, "usr/lib64/ld-linux-x86-64.so.2")
	libraries := filepath.Join(dir, libraryFolder)
	program := filepath.Join(dir, "usr/bin/dpkg-deb")
	out, err := exec.CommandContext(t.Context(), linker, "--library-path", libraries, "--list", program).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "not found") || strings.Contains(line, "=> /lib") || strings.Contains(line, "=> /usr") {
			t.Errorf("not from the tree: %s", line)
		}
	}
	if out, err := exec.CommandContext(t.Context(), linker, "--library-path", libraries, program, "--version").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A link to an absolute path means one in the package, not the file that this machine has there.
func TestAbsoluteLinksStayInThePackages(t *testing.T) {
	from := t.TempDir()
	if err := os.MkdirAll(filepath.Join(from, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr/bin/dpkg-deb", filepath.Join(from, "usr/bin/tool")); err != nil {
		t.Fatal(err)
	}
	if err := newPicker(from, t.TempDir()).take(Tool{Name: "tool"}); err == nil || !strings.Contains(err.Error(), "no package holds tool") {
		t.Errorf("error: %v", err)
	}
}

func TestPathsAreTakenAsTheyAre(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	for name, content := range map[string]string{"etc/tool.conf": "x", "etc/folder/plugin": "not ELF"} {
		if err := write(filepath.Join(from, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := newPicker(from, to)
	if err := p.take(Tool{Name: "etc/tool.conf"}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "etc/tool.conf")); err != nil || string(got) != "x" {
		t.Errorf("file: %q, %v", got, err)
	}
	if err := p.take(Tool{Name: "etc/folder"}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "etc/folder/plugin")); err != nil || string(got) != "not ELF" {
		t.Errorf("file in a folder: %q, %v", got, err)
	}
	if err := p.take(Tool{Name: "etc/absent"}); err == nil {
		t.Error("a file that no package has was taken")
	}
}

func TestBundle(t *testing.T) {
	folder, file := t.TempDir(), filepath.Join(t.TempDir(), "etc/bundle")
	const certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for name, content := range map[string]string{"b.crt": certificate, "a.crt": certificate + "\n", "readme": "x"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := bundle(folder, file); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != certificate+certificate {
		t.Errorf("bundle: %q, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(folder, "c.crt"), []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := bundle(folder, file); err == nil || !strings.Contains(err.Error(), "c.crt") {
		t.Errorf("error %v doesn't name the file", err)
	}
	if err := bundle(t.TempDir(), file); err == nil {
		t.Error("no certificate at all is a bundle")
	}
}

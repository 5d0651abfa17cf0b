package oci

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// untar unpacks an archive of directories, files and links.
func untar(t *testing.T, from io.Reader, dir string) {
	t.Helper()
	archive := tar.NewReader(from)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.Mkdir(path, 0o755)
			if os.IsExist(err) {
				err = nil
			}
			if err == nil {
				err = os.Chmod(path, h.FileInfo().Mode())
			}
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		case tar.TypeReg:
			var content []byte
			if content, err = io.ReadAll(archive); err == nil {
				err = os.WriteFile(path, content, h.FileInfo().Mode())
			}
		default:
			t.Fatalf("%s is of type %c", h.Name, h.Typeflag)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestTarHasFixedOwnersTimesAndOrder(t *testing.T) {
	var b bytes.Buffer
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("x"), 0o700); err != nil {
		t.Fatal(err)
	}
	in := tree{"z/file": text("z"), "a": link("z"), "m/program": copyOf(program, 0o755), "tmp": directory(0o1777)}
	if err := in.writeTar(&b); err != nil {
		t.Fatal(err)
	}
	type line struct {
		Name string
		Mode int64
		Link string
	}
	var got []line
	for archive := tar.NewReader(&b); ; {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d:%d %s, time %v", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		got = append(got, line{h.Name, h.Mode, h.Linkname})
	}
	want := []line{{"a", 0o777, "z"}, {"m/", 0o755, ""}, {"m/program", 0o755, ""}, {"tmp/", 0o1777, ""}, {"z/", 0o755, ""}, {"z/file", 0o644, ""}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestMissingFileIsNamed(t *testing.T) {
	err := tree{"opt/bin/flanneld": copyOf("/nonexistent/flanneld", 0o755)}.writeTar(io.Discard)
	if err == nil || !strings.Contains(err.Error(), "opt/bin/flanneld") {
		t.Errorf("error: %v", err)
	}
	if err := (tree{"": below("/nonexistent/tree")}).writeTar(io.Discard); err == nil {
		t.Error("a missing tree is an empty one")
	}
}

func TestPickerTakesWhatAProgramNeeds(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	gcc := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "gcc", args...).CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v: %s", err, out)
		}
	}
	for _, dir := range []string{"sbin", libraryFolder, "etc"} {
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
	gcc("-nostdlib", "-Wl,--no-as-needed", "-Wl,-e,main", "-Wl,-dynamic-linker,/lib64/ld-linux-none.so", "-o", filepath.Join(from, "sbin", "asker"), source, real)

	p := picker{from: from, to: to, taken: map[string]bool{}}
	asker := tool{Package: "x", Name: "asker", Links: []string{"alias"}}
	if err := p.tool(asker); err == nil || !strings.Contains(err.Error(), "ld-linux-none.so") {
		t.Fatalf("the missing dynamic linker isn't named: %v", err)
	}
	gcc("-shared", "-fPIC", "-nostdlib", "-o", filepath.Join(from, libraryFolder, "ld-linux-none.so"), source)
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	p.taken = map[string]bool{}
	if err := p.tool(asker); err != nil {
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
	if err := p.tool(tool{Package: "x", Name: "absent"}); err == nil {
		t.Error("a tool that no package has was taken")
	}
}

func TestListsStateFollowsUpdates(t *testing.T) {
	dir := t.TempDir()
	state := func() string {
		s, err := listsState(dir)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	empty := state()
	for _, name := range []string{"lock", "mirror_Packages"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		if changed := state() != empty; changed != (name != "lock") {
			t.Errorf("%s changes the state: %v", name, changed)
		}
	}
}

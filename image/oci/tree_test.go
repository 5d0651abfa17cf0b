package oci

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
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

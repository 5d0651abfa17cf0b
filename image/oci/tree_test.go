package oci

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestMissingFileIsNamed(t *testing.T) {
	for _, l := range []layer{{files: map[string]string{"opt/bin/flanneld": "/nonexistent/flanneld"}}, {files: map[string]string{"": "/nonexistent/tree"}}} {
		if _, err := l.tree(); err == nil || !strings.Contains(err.Error(), "/nonexistent/") {
			t.Errorf("%v: %v", l.files, err)
		}
	}
}

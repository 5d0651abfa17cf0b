package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestPutInPlaceReplacesNothing(t *testing.T) {
	dir := t.TempDir()
	made, name, link := filepath.Join(dir, "made"), filepath.Join(dir, "name"), filepath.Join(dir, "link")
	content := func(path string) string {
		data, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		return string(data)
	}
	for _, err := range []error{os.WriteFile(made, []byte("new"), 0o640), os.WriteFile(name, []byte("old"), 0o600), os.Symlink("nowhere", link)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, taken := range []string{name, link} {
		if err := putInPlace(made, taken); !errors.Is(err, fs.ErrExist) {
			t.Errorf("over %s: %v", taken, err)
		}
	}
	if content(name) != "old" || content(made) != "new" {
		t.Errorf("there is %q, and %q", content(name), content(made))
	}
	free := filepath.Join(dir, "free")
	if err := putInPlace(filepath.Join(dir, "nothing"), free); err == nil {
		t.Error("nothing has got a name")
	}
	if _, err := os.Lstat(free); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was claimed is still there: %v", err)
	}
	if err := putInPlace(made, free); err != nil || content(free) != "new" {
		t.Errorf("%q, %v", content(free), err)
	}
	if info, err := os.Stat(free); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info, err)
	}
}

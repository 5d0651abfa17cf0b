package main

import (
	"os"
	"path/filepath"
	"testing"
)

// The link to the image's file becomes a file, and the image's stays.
func TestNameSystem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, image := filepath.Join(dir, "os-release"), filepath.Join(dir, "image")
	if err := os.Symlink("image", path); err != nil {
		t.Fatal(err)
	}
	if err := nameSystem(path); err != nil {
		t.Errorf("without the image's file: %v", err)
	}
	if err := os.WriteFile(image, []byte("ID=garboard\n"), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := nameSystem(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("%v, %v", info, err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "ID=garboard\n" {
		t.Errorf("%q, %v", text, err)
	}
}

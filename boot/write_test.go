package boot

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func TestWriteFile(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	dir := t.TempDir()
	name := filepath.Join(dir, "config.yaml")
	for _, step := range []struct {
		data string
		perm fs.FileMode
	}{{"first, longer", 0o600}, {"second", 0o644}, {"", 0o400}} {
		if err := WriteFile(name, []byte(step.data), step.perm); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(name)
		if err != nil || string(data) != step.data {
			t.Errorf("got %q, %v, want %q", data, err, step.data)
		}
		info, err := os.Stat(name)
		if err != nil || info.Mode().Perm() != step.perm {
			t.Errorf("mode %v, %v, want %v in spite of the umask", info.Mode(), err, step.perm)
		}
	}
	onlyFile(t, dir, "config.yaml")
}

func TestWriteFileRelative(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := WriteFile("x", []byte("y"), 0o600); err != nil {
		t.Fatal(err)
	}
	onlyFile(t, dir, "x")
}

// A link is replaced, not followed: a link can't redirect the write to another file.
func TestWriteFileReplacesLink(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(link, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(target); string(data) != "kept" {
		t.Errorf("target holds %q", data)
	}
}

func TestWriteFileErrors(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "taken", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ path, want string }{
		{filepath.Join(dir, "absent", "x"), "no such file or directory"},
		{filepath.Join(dir, "taken"), "file exists"},
	} {
		err := WriteFile(tt.path, []byte("x"), 0o600)
		if err == nil || !strings.HasPrefix(err.Error(), "write "+tt.path+": ") || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.path, err)
		}
	}
	onlyFile(t, dir, "taken") // the temporary file is gone
}

// Readers see one of the complete contents, while writers replace it.
func TestWriteFileIsAtomic(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	contents := [][]byte{bytes.Repeat([]byte("a"), 70_000), bytes.Repeat([]byte("b"), 50_000)}
	if err := WriteFile(name, contents[0], 0o600); err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for _, content := range contents {
		writers.Go(func() {
			for range 20 {
				if err := WriteFile(name, content, 0o600); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		default:
		}
		data, err := os.ReadFile(name)
		if err != nil || !bytes.Equal(data, contents[0]) && !bytes.Equal(data, contents[1]) {
			t.Fatalf("read %d bytes, %v", len(data), err)
		}
	}
}

func onlyFile(t *testing.T, dir, want string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].Name() != want {
		t.Errorf("directory holds %v, want only %s", entries, want)
	}
}

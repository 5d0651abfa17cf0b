package untrusted

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// attacked is a directory as a pod may leave it, with a secret outside of it.
func attacked(t *testing.T) (dir, secret string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes device nodes")
	}
	top := t.TempDir()
	dir, secret = filepath.Join(top, "var"), filepath.Join(top, "secret")
	must(t, os.MkdirAll(filepath.Join(dir, "directory"), 0o755))
	must(t, os.WriteFile(secret, []byte("key"), 0o600))
	must(t, os.Symlink(secret, filepath.Join(dir, "link")))
	must(t, os.Symlink("/dev/zero", filepath.Join(dir, "zero")))
	must(t, os.Symlink(top, filepath.Join(dir, "out")))
	must(t, os.Symlink("nothing", filepath.Join(dir, "dangling")))
	must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, unix.Mknod(filepath.Join(dir, "device"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))))
	must(t, os.WriteFile(filepath.Join(dir, "huge"), nil, 0o600))
	must(t, os.Truncate(filepath.Join(dir, "huge"), 1<<40))
	must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o640))
	must(t, os.Link(filepath.Join(dir, "file"), filepath.Join(dir, "second")))
	must(t, os.WriteFile(filepath.Join(dir, "alone"), []byte("log"), 0o640))
	return dir, secret
}

// What a pod has put in the place of a file is neither read, nor waited for, nor written to.
func TestNotAFile(t *testing.T) {
	dir, secret := attacked(t)
	for _, name := range []string{"link", "zero", "out/secret", "dangling", "fifo", "device", "directory", "huge"} {
		path := filepath.Join(dir, name)
		if data, err := ReadFile(path, 1<<20); err == nil {
			t.Errorf("%s was read: %q", name, data)
		}
		if name == "huge" {
			continue
		}
		if f, err := OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err == nil {
			f.Close()
			t.Errorf("%s was opened to be written", name)
		}
		if name != "out/secret" && name != "directory" { // the new file takes the place of what was there
			must(t, WriteFile(path, []byte("new"), 0o600))
			got, err := ReadFile(path, 3)
			if err != nil || string(got) != "new" {
				t.Errorf("%s after it was replaced: %q, %v", name, got, err)
			}
		} else if WriteFile(path, nil, 0o600) == nil {
			t.Errorf("%s was written", name)
		}
	}
	if got, err := os.ReadFile(secret); err != nil || string(got) != "key" {
		t.Errorf("the secret is now %q, %v", got, err)
	}
	if _, err := OpenLog(filepath.Join(dir, "second")); err == nil {
		t.Error("a log was read that is the second name of another file")
	}
	f, err := OpenLog(filepath.Join(dir, "alone"))
	must(t, err)
	f.Close()
}

// Directories are made, listed, changed and removed only where the path leads by itself.
func TestDirectoriesBehindLinks(t *testing.T) {
	dir, secret := attacked(t)
	top := filepath.Dir(dir)
	for what, do := range map[string]func() error{
		"list":          func() error { _, err := ReadDir(filepath.Join(dir, "out")); return err },
		"list a FIFO":   func() error { _, err := ReadDir(filepath.Join(dir, "fifo")); return err },
		"make":          func() error { return MkdirAll(filepath.Join(dir, "out/made/deep"), 0o755) },
		"make at":       func() error { return MkdirAll(filepath.Join(dir, "out"), 0o755) },
		"make dangling": func() error { return MkdirAll(filepath.Join(dir, "dangling/x"), 0o755) },
		"mode":          func() error { return Chmod(filepath.Join(dir, "out"), 0o777) },
		"mode of FIFO":  func() error { return Chmod(filepath.Join(dir, "fifo"), 0o777) },
		"remove":        func() error { return Remove(filepath.Join(dir, "out/secret")) },
		"remove all":    func() error { return RemoveAll(filepath.Join(dir, "out/secret")) },
		"rename":        func() error { return Rename(filepath.Join(dir, "file"), filepath.Join(dir, "out/file")) },
		"rename out":    func() error { return Rename(filepath.Join(dir, "out/secret"), filepath.Join(dir, "stolen")) },
		"sync":          func() error { return Sync(filepath.Join(dir, "fifo")) },
		"stat":          func() error { _, err := Stat(filepath.Join(dir, "out/secret")); return err },
	} {
		if do() == nil {
			t.Errorf("%s: no error", what)
		}
	}
	for _, gone := range []string{"made", "file"} {
		if _, err := os.Lstat(filepath.Join(top, gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was made: %v", gone, err)
		}
	}
	must(t, RemoveAll(filepath.Join(dir, "out")))
	must(t, RemoveAll(filepath.Join(dir, "out"))) // again: nothing is there
	if _, err := os.Stat(secret); err != nil {
		t.Errorf("the tree behind a link was removed: %v", err)
	}
	must(t, RemoveAll(dir))
}

// The same calls do their work where nothing was prepared.
func TestUse(t *testing.T) {
	dir, _ := attacked(t)
	deep := filepath.Join(dir, "a/b/c")
	must(t, MkdirAll(deep, 0o750))
	must(t, MkdirAll(deep, 0o750))
	must(t, Chmod(deep, 0o700))
	file := filepath.Join(deep, "x.log")
	for _, want := range []bool{true, false} {
		wrote, err := WriteChanged(file, []byte("one\n"), 0o600)
		if err != nil || wrote != want {
			t.Errorf("written: %v, %v; want %v", wrote, err, want)
		}
	}
	f, err := OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	must(t, err)
	_, err = f.WriteString("two\n")
	must(t, errors.Join(err, f.Close()))
	f, err = OpenFile(filepath.Join(deep, "y.log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	must(t, errors.Join(err, f.Close()))
	must(t, Rename(file, filepath.Join(deep, "z.log")))
	must(t, errors.Join(Sync(deep), Sync(filepath.Join(deep, "z.log"))))
	paths, err := Glob(deep, "*.log")
	if want := []string{filepath.Join(deep, "y.log"), filepath.Join(deep, "z.log")}; err != nil || strings.Join(paths, " ") != strings.Join(want, " ") {
		t.Errorf("there are %q, %v; want %q", paths, err, want)
	}
	if got, err := ReadFile(filepath.Join(deep, "z.log"), 8); err != nil || !bytes.Equal(got, []byte("one\ntwo\n")) {
		t.Errorf("read %q, %v", got, err)
	}
	if _, err := ReadFile(filepath.Join(deep, "z.log"), 7); err == nil {
		t.Error("a file was read that is larger than what was asked for")
	}
	if paths, err := Glob(filepath.Join(dir, "nowhere"), "*"); err != nil || paths != nil {
		t.Errorf("in no directory: %q, %v", paths, err)
	}
}

// A certificate that a program replaces is a link to a file beside it; another link isn't followed.
func TestLinkBeside(t *testing.T) {
	dir, secret := attacked(t)
	for to, reads := range map[string]bool{
		"file": true, filepath.Join(dir, "file"): true,
		"../secret": false, secret: false, "fifo": false, "device": false, "link": false, "nothing": false, "..": false, "/dev/zero": false,
	} {
		current := filepath.Join(dir, "current")
		must(t, RemoveAll(current))
		must(t, os.Symlink(to, current))
		got, err := ReadLinked(current, 1<<20)
		if reads != (err == nil) || reads && string(got) != "content" {
			t.Errorf("a link to %s: %q, %v", to, got, err)
		}
	}
	if got, err := ReadLinked(filepath.Join(dir, "file"), 1<<20); err != nil || string(got) != "content" {
		t.Errorf("no link: %q, %v", got, err)
	}
}

// A directory with entries without end is not read to its end.
func TestEndlessDirectory(t *testing.T) {
	dir := t.TempDir()
	for i := range maxEntries + 1 {
		must(t, unix.Mkfifo(filepath.Join(dir, "f"+string(rune('a'+i%26))+strings.Repeat("x", i/26%200)+strings.Repeat("y", i/5200)), 0o600))
	}
	if _, err := ReadDir(dir); err == nil {
		t.Error("all of it was read")
	}
}

package program

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
)

// checkout is a module with a program, a package that it imports, one that it doesn't, and a test.
func checkout(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, contents := range map[string]string{
		"go.mod":               "module github.com/garboard-os/garboard\n\ngo 1.26\n",
		"init/main.go":         "package main\n\nimport \"github.com/garboard-os/garboard/boot\"\n\nfunc main() { println(boot.Version) }\n",
		"init/main_test.go":    "package main\n",
		"boot/boot.go":         "package boot\n\nvar Version = \"unset\"\n",
		"elsewhere/another.go": "package elsewhere\n",
	} {
		edit(t, root, name, contents)
	}
	return root
}

func edit(t *testing.T, root, name, contents string) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(contents), 0o644); err != nil {
		t.Fatal(err)
	}
}

// What is imported decides whether a program is built again, and the release is stamped into it.
func TestBuild(t *testing.T) {
	root := checkout(t)
	b := &Builder{Root: root, Version: "v1.2.3", Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	build := func() string {
		t.Helper()
		path, err := b.Build(context.Background(), Init)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	first := build()
	if out, err := exec.Command(first).CombinedOutput(); err != nil || string(out) != "v1.2.3\n" {
		t.Errorf("the program says %q, %v", out, err)
	}
	edit(t, root, "init/main_test.go", "package main\n\n// edited\n")
	edit(t, root, "elsewhere/another.go", "package elsewhere\n\n// edited\n")
	if again := build(); again != first {
		t.Error("built again for an edit that isn't in it")
	}
	edit(t, root, "boot/boot.go", "package boot\n\nvar Version = \"edited\"\n")
	if again := build(); again == first {
		t.Error("not built again for an edit of what it imports")
	}
}

func TestBuildSaysWhatTheCompilerSays(t *testing.T) {
	root := checkout(t)
	edit(t, root, "boot/boot.go", "package boot\n\nvar Version = nosuch\n")
	b := &Builder{Root: root, Version: "v1.2.3", Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	if _, err := b.Build(context.Background(), Init); err == nil || !strings.Contains(err.Error(), "undefined: nosuch") {
		t.Errorf("error %v lacks the compiler's complaint", err)
	}
}

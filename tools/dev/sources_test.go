package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// useCache has the copy in a directory of the test's, and Go's results where they are.
func useCache(t *testing.T) {
	t.Helper()
	results, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOCACHE", strings.TrimSpace(string(results)))
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
}

// checkout is a new clone of the lucky module, with a test that opens a file.
func checkout(t *testing.T, comment string) string {
	t.Helper()
	dir := t.TempDir()
	lay(t, dir, luckyModule)
	lay(t, dir, map[string]string{".gitignore": "/out/\n", "out/log": "", "good/more_test.go": "package good\nimport \"testing\"\nfunc TestMore(t *testing.T) { t.Log(`" + comment + "`) }\n", "opens/testdata/file": "text", "opens/opens_test.go": `package opens
import ("os"; "testing")
func TestOpens(t *testing.T) {
	t.Log("` + comment + `")
	if _, err := os.ReadFile("testdata/file"); err != nil { t.Error(err) }
}
`})
	if out, err := exec.Command("git", "-C", dir, "init", "-q").CombinedOutput(); err != nil {
		t.Fatalf("git init: %v: %s", err, out)
	}
	return dir
}

// Another checkout's results count, whatever its name and its files' times are, until a file
// changes that a test opened.
func TestResultsOfAnotherCheckout(t *testing.T) {
	useCache(t)
	cached := func(dir string) int {
		t.Helper()
		sources, err := copySources(t.Context(), io.Discard, dir, "checkout")
		if err != nil {
			t.Fatal(err)
		}
		defer sources.close()
		if _, err := os.Stat(filepath.Join(sources.dir, "out")); err == nil {
			t.Error("what git ignores is copied")
		}
		var out strings.Builder
		r, err := goTest{dir: sources.dir}.run(t.Context(), &out, nil, "./good", "./opens")
		if err != nil || r.passed != 3 || r.packages != 2 {
			t.Fatalf("%v; it printed\n%s", err, out.String())
		}
		return r.cached
	}
	unique := time.Now().Format(time.RFC3339Nano) // no earlier run's results
	first, second := checkout(t, unique), checkout(t, unique)
	if n := cached(first); n != 0 {
		t.Errorf("%d packages are cached in the beginning", n)
	}
	if n := cached(second); n != 2 {
		t.Errorf("%d of 2 packages are cached in a second checkout", n)
	}
	lay(t, second, map[string]string{"opens/testdata/file": "TEXT"})
	if n := cached(second); n != 1 {
		t.Errorf("%d packages are cached where a file has changed that one opens", n)
	}
	if n := cached(first); n != 2 {
		t.Errorf("%d of 2 packages are cached where the change is undone", n)
	}
}

// The copy holds what the checkout has, and no more.
func TestSourceCopyFollows(t *testing.T) {
	useCache(t)
	dir := checkout(t, "copied")
	sources, err := copySources(t.Context(), io.Discard, dir, "checkout")
	if err != nil {
		t.Fatal(err)
	}
	lay(t, sources.dir, map[string]string{"left/over": "", "good/more": ""})
	if err := sources.close(); err != nil {
		t.Fatal(err)
	}
	// A file becomes a program, another goes, and a folder becomes a file.
	if err := os.Chmod(filepath.Join(dir, "good", "good_test.go"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "broken")), os.RemoveAll(filepath.Join(dir, "flaky"))); err != nil {
		t.Fatal(err)
	}
	lay(t, dir, map[string]string{"flaky": "a file"})
	if sources, err = copySources(t.Context(), io.Discard, dir, "checkout"); err != nil {
		t.Fatal(err)
	}
	defer sources.close()
	for _, gone := range []string{"left", "good/more", "broken"} {
		if _, err := os.Lstat(filepath.Join(sources.dir, gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there (%v)", gone, err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(sources.dir, "flaky")); err != nil || string(text) != "a file" {
		t.Errorf("flaky is %q (%v)", text, err)
	}
	if info, err := os.Stat(filepath.Join(sources.dir, "good", "good_test.go")); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("good_test.go: %v, %v", info, err)
	}
}

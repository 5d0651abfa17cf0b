package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// lay writes files below a directory.
func lay(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBootTests(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	const tag = "//go:build "
	const a, b, c = "\nfunc TestA(t *testing.T) {}\n", "\nfunc TestB(t *testing.T) {}\n", "\nfunc TestC(t *testing.T) {}\n"
	lay(t, root, map[string]string{
		"qemu/stories/b/b_test.go":        tag + "story && long\npackage b\n// " + machineWord + a,
		"qemu/stories/a/one_test.go":      tag + "story\npackage a" + a + b,
		"qemu/stories/a/two_test.go":      tag + "story\npackage a\nvar _ = " + machineWord + c,
		"qemu/stories/d/d.go":             tag + "story\n" + a,
		"qemu/stories/c/module/go.mod":    "module m",
		"qemu/stories/c/module/m_test.go": tag + "story\npackage m" + a,
		"qemu/stories/f/f_test.go":        "package f" + a,
		"qemu/stories/h/main_test.go":     tag + "story\nfunc TestMain(m *testing.M) { }",
		"services/i/i_test.go":            "package i" + a,
		"services/i/i_kernel_test.go":     tag + "kernel\npackage i" + a,
	})
	got, err := bootTests(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []bootTest{
		{"TestA", "./qemu/stories/a", storyTag, false}, {"TestB", "./qemu/stories/a", storyTag, false}, {"TestC", "./qemu/stories/a", storyTag, true},
		{"TestA", "./qemu/stories/b", longTag, true}, {"TestA", "./services/i", kernelTag, false},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(bootTest{})); diff != "" {
		t.Error(diff)
	}

	// Tests are chosen by their names, so no two have the same.
	lay(t, root, map[string]string{"services/j/j_test.go": tag + "story\npackage j" + b})
	if _, err := bootTests(root); err == nil || !strings.Contains(err.Error(), "TestB is a test of ./qemu/stories/a and of ./services/j") {
		t.Errorf("two tests with one name: %v", err)
	}
}

// A tag that bootTests doesn't know would be run by no phase.
func TestAllBootTestsAreRun(t *testing.T) {
	t.Parallel()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	all, err := bootTests(root)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, test := range all {
		count[test.tag]++
	}
	for _, tag := range []string{storyTag, longTag, kernelTag} {
		if count[tag] == 0 {
			t.Errorf("no test has the tag %q", tag)
		}
		delete(count, tag)
	}
	if len(count) > 0 {
		t.Errorf("no phase runs the tests with the tags %v", count)
	}
}

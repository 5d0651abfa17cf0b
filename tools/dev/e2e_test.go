package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/components"
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
		"qemu/e2e/b/b_test.go":        tag + "e2e && long\npackage b\n// " + machineWord + a,
		"qemu/e2e/a/one_test.go":      tag + "e2e\npackage a" + a + b,
		"qemu/e2e/e/one_test.go":      tag + "e2e\npackage e\nfunc TestD(t *testing.T) { takes(t) }\nfunc other() {}\n",
		"qemu/e2e/e/two_test.go":      tag + "e2e\npackage e\nfunc TestE(t *testing.T) { other() }\nfunc takes(t *testing.T) { c" + promiseWord + ") }\n",
		"qemu/e2e/a/more_test.go":     tag + "e2e\npackage a\nfunc more() {}\n",
		"qemu/e2e/a/two_test.go":      tag + "e2e\npackage a\nvar _ = " + machineWord + c,
		"qemu/e2e/d/d.go":             tag + "e2e\n" + a,
		"qemu/e2e/c/module/go.mod":    "module m",
		"qemu/e2e/c/module/m_test.go": tag + "e2e\npackage m" + a,
		"qemu/e2e/f/f_test.go":        "package f" + a,
		"qemu/e2e/h/main_test.go":     tag + "e2e\nfunc TestMain(m *testing.M) { }",
		"init/init_test.go":           "package main" + a,
		"services/i/i_test.go":        "package i" + a,
		"services/i/i_kernel_test.go": tag + "kernel\npackage i" + a,
	})
	got, err := bootTests(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []bootTest{
		{"TestA", "./qemu/e2e/a", e2eTag, false, false, []string{"qemu/e2e/a/one_test.go", "qemu/e2e/a/more_test.go"}},
		{"TestB", "./qemu/e2e/a", e2eTag, false, false, []string{"qemu/e2e/a/one_test.go", "qemu/e2e/a/more_test.go"}},
		{"TestC", "./qemu/e2e/a", e2eTag, true, false, []string{"qemu/e2e/a/two_test.go", "qemu/e2e/a/more_test.go"}},
		{"TestA", "./qemu/e2e/b", longTag, true, false, []string{"qemu/e2e/b/b_test.go"}},
		{"TestD", "./qemu/e2e/e", e2eTag, false, true, []string{"qemu/e2e/e/one_test.go"}},
		{"TestE", "./qemu/e2e/e", e2eTag, false, false, []string{"qemu/e2e/e/two_test.go"}},
		{"TestA", "./services/i", kernelTag, false, false, []string{"services/i/i_kernel_test.go"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(bootTest{})); diff != "" {
		t.Error(diff)
	}

	// Tests are chosen by their names, so no two have the same.
	lay(t, root, map[string]string{"services/j/j_test.go": tag + "e2e\npackage j" + b})
	if _, err := bootTests(root); err == nil || !strings.Contains(err.Error(), "TestB is a test of ./qemu/e2e/a and of ./services/j") {
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
	for _, tag := range []string{e2eTag, longTag, kernelTag} {
		if count[tag] == 0 {
			t.Errorf("no test has the tag %q", tag)
		}
		delete(count, tag)
	}
	if len(count) > 0 {
		t.Errorf("no phase runs the tests with the tags %v", count)
	}
}

// Optional components are built for the tests that use them, and for no others.
func TestOptionalComponents(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	lay(t, root, map[string]string{
		"a_test.go": "package a\n// e2etest.SelfHosted(t)\n",
		"b_test.go": "package b\n// e2etest.OtherKubernetes(t), e2etest.SelfHosted(t)\n",
		"c_test.go": "package c\n",
	})
	of := func(file string) bootTest { return bootTest{files: []string{file, "c_test.go"}} }
	old, other := []string{components.PodCheckpointer, components.RelinkedKubernetesVersion}, []string{components.OtherKubernetesVersion}
	for _, test := range []struct {
		tests []bootTest
		want  [][]string
	}{
		{nil, [][]string{nil}},
		{[]bootTest{of("c_test.go")}, [][]string{nil}},
		{[]bootTest{of("a_test.go"), of("a_test.go")}, [][]string{nil, old}},
		{[]bootTest{of("b_test.go"), of("c_test.go")}, [][]string{nil, old, other}},
	} {
		got, err := optionalOf(root, test.tests)
		if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
			t.Errorf("%v: %v, %s", test.tests, err, diff)
		}
	}
}

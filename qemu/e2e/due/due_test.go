package due

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// lay writes files below a directory.
func lay(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A change makes those tests due that cover it: not a comment, a unit test, or a document.
// A test that passed with the present content isn't due, and one that failed is.
func TestWhatIsDue(t *testing.T) {
	t.Parallel()
	dir, results := t.TempDir(), Results(filepath.Join(t.TempDir(), "results"))
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-c", "user.name=n", "-c", "user.email=e"}, args...)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	lay(t, dir, map[string]string{
		"services/system/network/a.go":  "package network\n\n// a comment\nconst a = 1\n",
		"services/kubernetes/vip/b.go":  "package vip\n",
		"qemu/e2e/vip/vip_test.go":      "//go:build e2e && long\n\npackage vip\n",
		"qemu/e2e/vip/other_test.go":    "package vip\n",
		"qemu/e2e/vip/testdata/a.txt":   "1",
		"services/kubernetes/etcd/c.go": "package etcd\n",
	})
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "first")
	vip := Test{"qemu/e2e/vip", "TestSharedAddress", []string{"qemu/e2e/vip/vip_test.go"}}
	scale := Test{"qemu/e2e/scale", "TestOneThreeFiveThree", nil}
	why := func(test Test) string {
		t.Helper()
		now, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		former, err := At(t.Context(), dir, "HEAD", now)
		if err != nil {
			t.Fatal(err)
		}
		last, err := results.Last(test.String())
		if err != nil {
			t.Fatal(err)
		}
		return Why(test, last, now, former, "BASE")
	}
	ends := func(test Test, failure string) {
		t.Helper()
		now, err := Read(dir)
		if err == nil {
			err = results.Add(test.String(), Result{Commit: "c0ffee", Covered: test.Covered(now), Passed: failure == "", Took: time.Second, FirstFailure: failure})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	step := func(what string, files map[string]string, wantVIP, wantScale string) {
		t.Helper()
		lay(t, dir, files)
		if got := why(vip); got != wantVIP {
			t.Errorf("%s: vip %q, want %q", what, got, wantVIP)
		}
		if got := why(scale); got != wantScale {
			t.Errorf("%s: scale %q, want %q", what, got, wantScale)
		}
	}
	step("nothing changed", nil, "", "")
	step("what no system sees", map[string]string{
		"services/system/network/a.go":      "package network\n\n// another comment\nconst  a = 1\n",
		"services/system/network/a_test.go": "package network\n",
		"qemu/e2e/vip/other_test.go":        "package vip\n\nvar other int\n",
		"services/system/network/notes.md":  "a document",
	}, "", "")
	step("code", map[string]string{"services/system/network/a.go": "package network\n\nconst a = 2\n"},
		"not run here; changed since BASE: services/system/network", "")
	ends(vip, "no answer")
	step("it failed", nil, "failed: no answer", "")
	ends(vip, "")
	step("it passed", nil, "", "")
	if last, err := results.Last(vip.String()); err != nil || last.FirstFailure != "no answer" {
		t.Errorf("%+v, %v: the first failure is forgotten", last, err)
	}
	step("a new file, and the test", map[string]string{
		"services/kubernetes/etcd/new.go": "package etcd\n", "qemu/e2e/vip/vip_test.go": "//go:build e2e\n\npackage vip\n",
	}, "changed since it passed at c0ffee: services/kubernetes/etcd, the test", "not run here; changed since BASE: services/kubernetes/etcd")
	if err := os.Remove(filepath.Join(dir, "services/kubernetes/etcd/new.go")); err != nil {
		t.Fatal(err)
	}
	step("taken back", map[string]string{"qemu/e2e/vip/testdata/a.txt": "2"}, "changed since it passed at c0ffee: the test", "")
}

// A test of make test has no base: it is due until it passes. Where the table has no row, it covers its own package.
func TestDueWithoutBase(t *testing.T) {
	t.Parallel()
	test := Test{"services/core/dag", "TestReal", []string{"services/core/dag/real_test.go"}}
	now := Content{"services/core/dag/dag.go": "1", "services/core/dag/real_test.go": "1", "services/core/logs/logs.go": "1"}
	if got := Why(test, nil, now, nil, ""); got != "not run here" {
		t.Errorf("without a result: %q", got)
	}
	passed := &Result{Commit: "c0ffee", Covered: test.Covered(now), Passed: true}
	now["services/core/logs/logs.go"] = "2"
	if got := Why(test, passed, now, nil, ""); got != "" {
		t.Errorf("another package was changed: %q", got)
	}
	now["services/core/dag/dag.go"] = "2"
	if got := Why(test, passed, now, nil, ""); got != "changed since it passed at c0ffee: services/core/dag" {
		t.Errorf("its package was changed: %q", got)
	}
}

// A result that was cut short is as none.
func TestDamagedResult(t *testing.T) {
	t.Parallel()
	r := Results(t.TempDir())
	if err := os.WriteFile(r.path("a.Test"), []byte(`{"Commit`), 0o644); err != nil {
		t.Fatal(err)
	}
	if last, err := r.Last("a.Test"); last != nil || err != nil {
		t.Errorf("%v, %v", last, err)
	}
	if strings.Contains(filepath.Base(r.path("qemu/e2e/a.Test")), "/") {
		t.Error("a result is in a directory")
	}
}

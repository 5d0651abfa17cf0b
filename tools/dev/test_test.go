package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestLongPhaseRunsWhereItFits(t *testing.T) {
	for _, test := range []struct {
		name, only string
		within     time.Duration
		ran, said  string
	}{
		{"plain", "", 0, "short", "short: passed"},
		{"too little time", "long", 29 * time.Minute, "", "left out: it may take 30m0s, and there are 29m0s"},
		{"time enough", "long", 30 * time.Minute, "long", "long: passed"},
		{"asked for", "long", 0, "long", "long: passed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var ran []string
			note := func(name string) func(context.Context, string, io.Writer) error {
				return func(context.Context, string, io.Writer) error { ran = append(ran, name); return nil }
			}
			all := []phase{{name: "short", run: note("short")}, {name: "long", run: note("long"), apart: true, needs: 30 * time.Minute}}
			var out strings.Builder
			if err := runPhases(t.Context(), all, ".", &out, test.only, test.within); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(ran, " "); got != test.ran || !strings.Contains(out.String(), test.said) {
				t.Errorf("ran %q and said:\n%s", got, out.String())
			}
		})
	}
	if err := runPhases(t.Context(), nil, ".", io.Discard, "tall", 0); err == nil {
		t.Error("a phase that isn't known is run")
	}
}

func TestStoryFolders(t *testing.T) {
	root := t.TempDir()
	const a, b = "\nfunc TestA(t *testing.T) {}\n", "\nfunc TestB(t *testing.T) {}\n"
	for path, text := range map[string]string{
		"b/b_test.go": longTag + "package b\n// " + machineWord + a, "a/one_test.go": longTag + "package a" + a, "a/two_test.go": longTag + "package a" + b,
		"c/c_test.go": "//go:build story\npackage c" + a, "d/d.go": longTag + a,
		"e/one_test.go": "package e" + b, "e/two_test.go": "//go:build story\nvar _ = " + machineWord + a,
		"f/f_test.go": "package f", "c/module/go.mod": "module m", "c/module/m_test.go": "//go:build story\npackage m" + a,
		"g/g_test.go": "//go:build story\npackage g" + a, "g/machine_test.go": longTag + "package g\n// " + machineWord + b,
		"services/i/i_test.go": "package i" + a, "services/i/real_test.go": "//go:build story\npackage i" + b, "services/j/j_test.go": "package j" + a,
		"h/h_test.go": longTag + "package h" + a, "h/main_test.go": "//go:build story\nfunc TestMain(m *testing.M) { }",
	} {
		if !strings.HasPrefix(path, "services/") {
			path = filepath.Join("qemu", "stories", path)
		}
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := storyFolders(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []storyFolder{
		{path: "./qemu/stories/a", long: []string{"TestA", "TestB"}}, {path: "./qemu/stories/b", long: []string{"TestA"}},
		{path: "./qemu/stories/c", short: true}, {path: "./qemu/stories/e", short: true, machines: true},
		{path: "./qemu/stories/g", short: true, long: []string{"TestB"}}, {path: "./qemu/stories/h", long: []string{"TestA"}},
		{path: "./services/i", short: true},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(storyFolder{})); diff != "" {
		t.Error(diff)
	}
}

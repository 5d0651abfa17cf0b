package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/google/go-cmp/cmp"
)

func TestLongPhaseRunsWhereItFits(t *testing.T) {
	for _, test := range []struct {
		name, only string
		within     time.Duration
		ran, said  string
	}{
		{"plain", "", 0, "short", "short: passed"},
		{"too little time", "long", 29 * time.Minute, "", "long: LEFT OUT for lack of time, and so not tested: tales. It may take 30m0s, and there are 29m0s."},
		{"no time", "long", -time.Minute, "", "and there are 0s."},
		{"time enough", "long", 30 * time.Minute, "long", "long: passed"},
		{"asked for", "long", 0, "long", "long: passed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var ran []string
			note := func(name string) func(context.Context, string, io.Writer) error {
				return func(context.Context, string, io.Writer) error { ran = append(ran, name); return nil }
			}
			all := []phase{{name: "short", run: note("short")}, {name: "long", what: "tales", run: note("long"), apart: true, needs: 30 * time.Minute}}
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

// The sum of what ran is said last; what is apart isn't in it.
func TestPhasesInAll(t *testing.T) {
	nothing := func(context.Context, string, io.Writer) error { return nil }
	all := []phase{{name: "lint", run: nothing}, {name: "unit", run: nothing}, {name: "long", run: nothing, apart: true}}
	synctest.Test(t, func(t *testing.T) { // whose time stands still
		var out strings.Builder
		if err := runPhases(t.Context(), all, ".", &out, "", 0); err != nil {
			t.Fatal(err)
		}
		if want := "== all 2: passed in 0s; where everything is built, it may take 25m0s\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("it says\n%s, not at the end %s", out.String(), want)
		}
	})
}

// A phase that hangs fails before its time is over; one that fails by itself says nothing
// of time.
func TestPhaseThatHangs(t *testing.T) {
	broken := errors.New("it broke")
	for want, test := range map[string]struct {
		within time.Duration
		run    func(context.Context) error
	}{
		"long: not done within 60ms": {60 * time.Millisecond, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
		"long (after 0s): it broke":  {time.Hour, func(context.Context) error { return broken }},
	} {
		all := []phase{{name: "long", apart: true, run: func(ctx context.Context, _ string, _ io.Writer) error { return test.run(ctx) }}}
		synctest.Test(t, func(t *testing.T) {
			err := runPhases(t.Context(), all, ".", io.Discard, "long", test.within)
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
}

// The go command waits for its tests, whatever it is told: so they are told, too.
func TestWhatHangsIsEnded(t *testing.T) {
	for _, test := range []struct{ name, said string }{{"time has run out", "QUIT"}, {"interrupted", "INT"}} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if test.said == "QUIT" {
				ctx = late{ctx}
			}
			out := &hears{word: "hangs\n", then: cancel}
			start := time.Now()
			// A parent that waits, and its child that says what ends it.
			child := `trap "echo QUIT; exit 1" QUIT; trap "echo INT; exit 1" INT; echo hangs; while :; do sleep 0.05; done`
			err := run(ctx, ".", out, "sh", "-c", `trap : QUIT INT; sh -c '`+child+`'; exit 1`)
			if err == nil || !strings.Contains(out.String(), test.said+"\n") {
				t.Errorf("%v; it said %q", err, out.String())
			}
			if took := time.Since(start); took > eventually.Scale(10*time.Second) {
				t.Errorf("it took %s: the child was left to itself", took)
			}
		})
	}
}

// late is a context that ends because its time is over.
type late struct{ context.Context }

func (c late) Err() error {
	if c.Context.Err() == nil {
		return nil
	}
	return context.DeadlineExceeded
}

// hears is a writer that does something at a word.
type hears struct {
	strings.Builder
	word string
	then func()
}

func (h *hears) Write(p []byte) (int, error) {
	if strings.Contains(string(p), h.word) {
		h.then()
	}
	return h.Builder.Write(p)
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
		{path: "./qemu/stories/c", short: []string{"TestA"}}, {path: "./qemu/stories/e", short: []string{"TestA"}, machines: true},
		{path: "./qemu/stories/g", short: []string{"TestA"}, long: []string{"TestB"}}, {path: "./qemu/stories/h", long: []string{"TestA"}},
		{path: "./services/i", short: []string{"TestB"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(storyFolder{})); diff != "" {
		t.Error(diff)
	}
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// The last line says what ran, what did not, and what was booted.
func TestPhases(t *testing.T) {
	t.Parallel()
	broken := errors.New("it broke")
	for _, test := range []struct {
		name, only string
		goesOn     bool
		err        error
		ran, last  string
	}{
		{"all", "", false, nil, "lint unit e2e", "== make test: passed in 0s (where everything is built, it may take 20m0s); complete: lint, unit, e2e; not run: nothing; booted: container 3, qemu 1\n"},
		{"asked for", "e2e", false, nil, "e2e", "== make test: passed in 0s; complete: e2e; not run: lint, unit; booted: container 1\n"},
		{"the first fails", "", false, broken, "lint", "== make test: FAILED in lint after 0s; complete: nothing; not run: unit, e2e; booted: container 1\n"},
		{"long tests go on", "", true, broken, "lint unit e2e", "== make test: FAILED in lint, unit, e2e after 0s; complete: nothing; not run: nothing; booted: container 3, qemu 1\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var ran []string
			note := func(name string, r result) func(context.Context, *suite) (result, error) {
				return func(context.Context, *suite) (result, error) { ran = append(ran, name); return r, test.err }
			}
			one := result{booted: map[string]int{"container": 1}}
			all := []phase{
				{name: "lint", run: note("lint", one)},
				{name: "unit", run: note("unit", result{booted: map[string]int{"container": 1, "qemu": 1}})},
				{name: "e2e", run: note("e2e", one)},
			}
			synctest.Test(t, func(t *testing.T) { // whose time stands still
				var out strings.Builder
				if err := runPhases(t.Context(), "make test", all, &suite{out: &out, goesOn: test.goesOn}, test.only); !errors.Is(err, test.err) {
					t.Errorf("error %v, want %v", err, test.err)
				}
				if got := strings.Join(ran, " "); got != test.ran || !strings.HasSuffix(out.String(), test.last) {
					t.Errorf("ran %q and printed:\n%s", got, out.String())
				}
			})
		})
	}
	if err := runPhases(t.Context(), "make test", nil, &suite{out: io.Discard}, "tall"); err == nil {
		t.Error("a phase that does not exist is run")
	}
}

// A phase beside another one begins with it, and ends also where the other fails; what it printed is in one piece.
func TestPhaseBesideAnother(t *testing.T) {
	t.Parallel()
	broken, begun, said := errors.New("it broke"), make(chan bool), make(chan bool)
	all := []phase{
		{name: "unit", run: func(context.Context, *suite) (result, error) { <-begun; close(said); return result{}, broken }},
		{name: "kernel", beside: true, run: func(_ context.Context, s *suite) (result, error) {
			fmt.Fprint(s.out, "one ")
			close(begun)
			<-said
			fmt.Fprintln(s.out, "piece")
			return result{passed: 3}, nil
		}},
		{name: "e2e", run: func(context.Context, *suite) (result, error) { t.Error("e2e runs"); return result{}, nil }},
	}
	var out strings.Builder
	if err := runPhases(t.Context(), "make test", all, &suite{out: &out}, ""); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{"== kernel: \none piece\n== kernel: passed", "3 passed", "complete: kernel; not run: e2e"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q isn't in:\n%s", want, &out)
		}
	}
}

// The go command waits for its tests, whatever signal it gets: so they get it, too.
func TestWhatHangsIsInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &hears{word: "hangs\n", then: cancel}
	start := time.Now()
	// A parent that waits, and its child that prints what ends it.
	child := `trap "echo INT; exit 1" INT; echo hangs; while :; do sleep 0.05; done`
	err := run(ctx, ".", out, "sh", "-c", `trap : INT; sh -c '`+child+`'; exit 1`)
	if err == nil || !strings.Contains(out.String(), "INT\n") {
		t.Errorf("%v; it printed %q", err, out.String())
	}
	if took := time.Since(start); took > eventually.Scale(10*time.Second) {
		t.Errorf("it took %s: the child got no signal", took)
	}
}

// A command that is killed, which can't hand on anything, leaves nothing that it has started.
func TestNothingOutlivesTheCommand(t *testing.T) {
	const runs = "GARBOARD_DEV_RUNS"
	if os.Getenv(runs) != "" {
		_ = run(t.Context(), ".", io.Discard, "sleep", "600")
		return
	}
	t.Parallel()
	command := exec.Command(os.Args[0], "-test.run=^TestNothingOutlivesTheCommand$")
	command.Env = append(os.Environ(), runs+"=1")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	var below int
	eventually.That(t, 20*time.Second, "it has started a program", func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", command.Process.Pid))
		for _, task := range tasks {
			text, _ := os.ReadFile(task) // a thread may be gone
			if _, err := fmt.Sscan(string(text), &below); err == nil {
				return nil
			}
		}
		return cmp.Or(err, errors.New("it has no children"))
	})
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait() // it was killed
	eventually.That(t, 20*time.Second, "the program has ended", func() error {
		if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", below)); err == nil && !strings.Contains(string(state), ") Z ") {
			return errors.New(string(state))
		}
		return nil
	})
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

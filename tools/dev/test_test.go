package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
)

func TestPhaseApartRunsIfAskedFor(t *testing.T) {
	t.Parallel()
	few := leftOut{"TestTales", "TestSagas"}
	for _, test := range []struct {
		name, only string
		err        error
		ran, said  string
	}{
		{"plain", "", nil, "short", "== short: passed in 0s\n"},
		{"asked for", "long", nil, "long", "== long: passed in 0s\n"},
		{"not all", "long", few, "long", "== long: what there was time for passed in 0s. LEFT OUT for lack of time, and so not tested: TestTales, TestSagas\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var ran []string
			note := func(name string) func(context.Context, string, io.Writer) error {
				return func(context.Context, string, io.Writer) error { ran = append(ran, name); return test.err }
			}
			all := []phase{{name: "short", run: note("short")}, {name: "long", what: "tales", run: note("long"), apart: true}}
			synctest.Test(t, func(t *testing.T) { // whose time stands still
				var out strings.Builder
				if err := runPhases(t.Context(), all, ".", &out, test.only, time.Minute); err != nil {
					t.Fatal(err)
				}
				if got := strings.Join(ran, " "); got != test.ran || !strings.HasSuffix(out.String(), test.said) {
					t.Errorf("ran %q and said:\n%s", got, out.String())
				}
			})
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

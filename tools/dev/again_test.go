package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// luckyModule is a module whose tests fail in all the ways that the runner tells apart. What
// fails by luck leaves a file, and passes where it is there.
var luckyModule = map[string]string{
	"go.mod": "module " + module + "\n\ngo 1.26\n",
	"good/good_test.go": `package good
import "testing"
func TestGood(t *testing.T) { t.Attr("booted", "container") }
func TestSkipped(t *testing.T) { t.Skip("not here") }
`,
	"flaky/flaky_test.go": `package flaky
import ("os"; "testing")
func TestGood(t *testing.T) { t.Log("quiet") }
func TestFlaky(t *testing.T) {
	t.Run("part", func(t *testing.T) {
		t.Log("before it")
		if _, err := os.Stat("seen"); err == nil { return }
		os.WriteFile("seen", nil, 0o600)
		t.Error("bad luck")
	})
}
`,
	// Ends in the middle: nothing is known of the other tests.
	"falls/falls_test.go": `package falls
import ("fmt"; "os"; "testing")
func TestFalls(t *testing.T) {
	if _, err := os.Stat("seen"); err == nil { return }
	os.WriteFile("seen", nil, 0o600)
	fmt.Println("    falls_test.go:1: no way on")
	os.Exit(3)
}
func TestAfter(t *testing.T) { fmt.Println("TestAfter ran") }
`,
	"broken/broken_test.go": `package broken
import "testing"
func TestBroken(t *testing.T) { t.Error("never works") }
`,
	"unbuilt/unbuilt_test.go": `package unbuilt
import "testing"
func TestUnbuilt(t *testing.T) { undefined() }
`,
	// What package testing prints where the race detector finds something, without the C compiler that it needs.
	"races/races_test.go": `package races
import "testing"
func TestRaces(t *testing.T) {
	t.Error("race detected during execution of test")
}
`,
}

func lucky(t *testing.T, packages ...string) (*suite, *strings.Builder, phase) {
	t.Helper()
	dir := t.TempDir()
	lay(t, dir, luckyModule)
	for path := range luckyModule { // go test has kept no result of another directory
		if folder := filepath.Dir(path); folder != "." {
			lay(t, dir, map[string]string{folder + "/own_test.go": "package " + folder + "\nimport \"os\"\nfunc init() { os.Setenv(`OWN`, `" + dir + "`) }\n"})
		}
	}
	var out strings.Builder
	return &suite{root: dir, out: &out}, &out, phase{name: "unit", run: func(ctx context.Context, s *suite) (result, error) {
		return goTest{dir: s.root}.run(ctx, s.out, nil, packages...)
	}}
}

// A test that fails gets a second chance, and where it passes then, the last lines say so.
func TestSecondChance(t *testing.T) {
	t.Parallel()
	s, out, p := lucky(t, "./good", "./flaky", "./falls")
	if err := runPhases(t.Context(), "make test", []phase{p}, s, ""); err != nil {
		t.Fatalf("%v; it printed\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) < 4 {
		t.Fatalf("it printed\n%s", out)
	}
	want := []string{
		"5 passed, 0 failed, 1 skipped",
		"FLAKY: falls (first failure: TestFalls did not end: falls_test.go:1: no way on)",
		"FLAKY: flaky.TestFlaky (first failure: flaky_test.go:9: bad luck)",
	}
	if diff := cmp.Diff(want, lines[len(lines)-4:len(lines)-1]); diff != "" {
		t.Errorf("last lines (-want +got):\n%s", diff)
	}
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "== make test: passed in ") || !strings.HasSuffix(last, "; booted: container 1") {
		t.Errorf("the last line is %s", last)
	}
	// The first failure is there as a whole; what passes is quiet; what had not begun when
	// its process fell is run, too.
	for text, times := range map[string]int{"flaky_test.go:6: before it\n": 1, "quiet": 0, "== again, alone: flaky.TestFlaky\n": 1, "-run=^(TestFlaky)$": 1} {
		if n := strings.Count(out.String(), text); n != times {
			t.Errorf("%q is there %d times, not %d, in\n%s", text, n, times, out)
		}
	}

	// go test keeps what passed; what is kept booted nothing.
	s.result, s.ran = result{}, nil
	out.Reset()
	if err := runPhases(t.Context(), "make test", []phase{p}, s, ""); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "3 packages, of which 1 are unchanged since they passed (cached)") || !strings.HasSuffix(out.String(), "; booted: nothing\n") || strings.Contains(out.String(), "FLAKY") {
		t.Errorf("the second run printed\n%s", out)
	}
}

// What fails twice fails, and so does what the compiler refuses or the race detector finds.
func TestBrokenTwice(t *testing.T) {
	t.Parallel()
	s, out, p := lucky(t, "./good", "./flaky", "./broken", "./unbuilt", "./races")
	err := runPhases(t.Context(), "make test", []phase{p}, s, "")
	if err == nil {
		t.Fatalf("it passed:\n%s", out)
	}
	for _, want := range []string{"unit: 3 failed, also when they ran again alone:", "\n  broken.TestBroken: broken_test.go:3: never works", "\n  unbuilt: ", "\n  races.TestRaces: "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %v\nwithout %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "flaky") || !strings.Contains(out.String(), "\nFLAKY: flaky.TestFlaky") || !strings.Contains(out.String(), "\n== make test: FAILED in unit after ") {
		t.Errorf("error %v; it printed\n%s", err, out)
	}
	if strings.Contains(out.String(), "== again, alone: unbuilt") || strings.Contains(out.String(), "== again, alone: races") || !strings.Contains(out.String(), "undefined: undefined") {
		t.Errorf("it printed\n%s", out)
	}
}

// Where very many fail, none is run again: that is no luck.
func TestTooManyFailures(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	var r result
	for i := range mostAgain + 1 {
		r.failures = append(r.failures, failure{pkg: "p", test: fmt.Sprintf("Test%d", i)})
	}
	if err := r.again(t.Context(), &out); err == nil || r.flaky != nil || out.Len() > 0 || !strings.Contains(err.Error(), "p.Test10") {
		t.Errorf("%v, %v, %q", r.flaky, err, out.String())
	}
}

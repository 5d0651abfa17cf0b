package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// bootedKey is the attribute (testing.T.Attr) of a test that booted a node, or a kernel. Its
// value says how: container, qemu or uml.
const bootedKey = "booted"

// A goTest is a call of go test. Its output is read as test2json writes it
// (go doc test2json): text is for people.
type goTest struct {
	dir  string
	args []string // flags other than -run
	env  []string // in addition
	// verbose prints also what tests print that pass.
	verbose bool
	// ended is told of each test that ends, and why it failed. It may be nil.
	ended func(test string, took time.Duration, failure string)
}

// A result is what go test found.
type result struct {
	packages, cached int // packages with tests; those whose former result go test repeated
	passed, skipped  int // tests, without their parts
	booted           map[string]int
	failures         []failure
	flaky            []failure // failed, and passed when they ran alone
}

// A failure is a test that failed, or a package that failed as a whole: where a process ended
// before its tests did, and where no single test was at fault.
type failure struct {
	in        goTest
	pkg, test string // test is "" for a whole package
	run       string // the tests of a whole package that were to run: a regular expression, or ""
	reason    string // one line
	noLuck    bool   // not to be run again: the compiler refuses it, or it has a data race
}

func (f failure) String() string {
	return nameOf(f.pkg, f.test)
}

func nameOf(pkg, test string) string {
	return strings.TrimSuffix(strings.TrimPrefix(pkg, module+"/")+"."+test, ".")
}

// module is the path of ours, which all packages share.
const module = "github.com/garboard-os/garboard"

// run tests the packages: the tests with these names, or all without names. An error means
// that go test itself did not get that far; tests that failed are in the result.
func (g goTest) run(ctx context.Context, out io.Writer, names []string, packages ...string) (result, error) {
	r := &reader{to: out, call: g, tests: map[string]*printed{}, result: result{booted: map[string]int{}}}
	args := append([]string{"test", "-json", "-vet=off"}, g.args...) // lint vets all
	if len(names) > 0 {
		r.names = "^(" + strings.Join(names, "|") + ")$"
		args = append(args, "-run="+r.names)
	}
	err := run(ctx, g.dir, r, "env", slices.Concat(g.env, []string{"go"}, args, packages)...) // env(1) becomes go
	if r.broken != nil {
		return r.result, fmt.Errorf("read what go test says: %w", r.broken)
	}
	if len(r.failures) > 0 && ctx.Err() == nil {
		err = nil // the failures say it
	}
	return r.result, err
}

// event is one line of test2json.
type event struct {
	Action, Package, ImportPath, Test, Output, Key, Value, FailedBuild string
	Elapsed                                                            float64
}

// printed is what a test, or a package outside of its tests, printed so far.
type printed struct {
	text   strings.Builder
	booted []string
	end    string // pass, fail or skip
}

// A reader turns the events of go test into text and a result.
type reader struct {
	result
	to     io.Writer
	call   goTest
	names  string
	part   []byte              // of a line
	tests  map[string]*printed // by package and test; a package's own without a test
	broken error               // of the writer behind it
}

// Write implements io.Writer. A line that is no event is printed as it is.
func (r *reader) Write(p []byte) (int, error) {
	r.part = append(r.part, p...)
	for {
		line, rest, whole := bytes.Cut(r.part, []byte{'\n'})
		if !whole {
			return len(p), nil
		}
		var e event
		if json.Unmarshal(line, &e) != nil || e.Action == "" {
			r.print(string(line) + "\n")
		} else {
			r.event(e)
		}
		r.part = rest
	}
}

func (r *reader) print(text string) {
	if _, err := io.WriteString(r.to, text); err != nil && r.broken == nil {
		r.broken = err
	}
}

// of is where the output of a test belongs: to the test that has no parent.
func (r *reader) of(e event) *printed {
	test, _, _ := strings.Cut(e.Test, "/")
	key := e.Package + " " + test
	if r.tests[key] == nil {
		r.tests[key] = &printed{}
	}
	return r.tests[key]
}

func (r *reader) event(e event) {
	switch e.Action {
	case "build-output":
		r.print(e.Output)
	case "output":
		r.of(e).text.WriteString(e.Output)
	case "attr":
		if e.Key == bootedKey {
			own := r.of(event{Package: e.Package})
			own.booted = append(own.booted, e.Value)
		}
	case "run":
		if r.of(e); r.call.verbose && !strings.Contains(e.Test, "/") {
			r.print(fmt.Sprintf("... %s\n", failure{pkg: e.Package, test: e.Test}))
		}
	case "pass", "fail", "skip":
		switch {
		case e.Test == "":
			r.packageEnds(e)
		case !strings.Contains(e.Test, "/"):
			r.testEnds(e)
		}
	}
}

func (r *reader) testEnds(e event) {
	p := r.of(e)
	p.end = e.Action
	switch e.Action {
	case "pass":
		r.passed++
	case "skip":
		r.skipped++
	case "fail":
		r.failures = append(r.failures, failure{in: r.call, pkg: e.Package, test: e.Test, reason: reason(p.text.String()), noLuck: raced.MatchString(p.text.String())})
	}
	if r.call.verbose || e.Action == "fail" {
		r.print(withReasons(p.text.String()))
	}
	r.tell(e.Package, e.Test, e.Elapsed, p)
}

// tell tells of a test that has ended, or that the end of its package has cut short.
func (r *reader) tell(pkg, test string, seconds float64, p *printed) {
	if r.call.ended == nil || p.end == "skip" {
		return
	}
	failure := ""
	if p.end != "pass" {
		failure = reason(p.text.String())
	}
	r.call.ended(nameOf(pkg, test), time.Duration(seconds*float64(time.Second)), failure)
}

// notTested is what go test prints of a package without tests.
const notTested = "[no test files]"

func (r *reader) packageEnds(e event) {
	own := r.of(event{Package: e.Package})
	text := own.text.String()
	if e.Action == "skip" || strings.Contains(text, notTested) {
		return
	}
	r.packages++
	if e.Action == "pass" {
		if strings.Contains(text, "\t(cached)") {
			r.cached++
			return // nothing ran, and nothing booted
		}
		r.print(fmt.Sprintf("ok  \t%s\t%.1fs\n", e.Package, e.Elapsed))
	}
	for _, how := range own.booted {
		r.booted[how]++
	}
	if e.Action == "fail" {
		r.packageFails(e, text)
	}
}

// packageFails notes a package that failed as a whole. Where its tests came to their end, and
// one of them failed, that test is noted already.
func (r *reader) packageFails(e event, own string) {
	text := own
	var open []string
	var passed, skipped int
	for key, p := range r.tests {
		pkg, test, _ := strings.Cut(key, " ")
		switch {
		case pkg != e.Package || test == "":
		case p.end == "pass":
			passed++
		case p.end == "skip":
			skipped++
		case p.end == "":
			r.print(withReasons(p.text.String()))
			open = append(open, test)
			r.tell(pkg, test, e.Elapsed, p)
			text += p.text.String()
		}
	}
	r.print(own)
	noted := slices.ContainsFunc(r.failures, func(f failure) bool { return f.pkg == e.Package })
	if e.FailedBuild == "" && noted && len(open) == 0 && strings.Contains("\n"+text, "\nFAIL\n") {
		return // package testing prints that line, when all its tests have ended
	}
	// The whole package counts once more: which tests were still to come is not known.
	r.passed, r.skipped = r.passed-passed, r.skipped-skipped
	r.failures = slices.DeleteFunc(r.failures, func(f failure) bool { return f.pkg == e.Package })
	f := failure{in: r.call, pkg: e.Package, run: r.names, reason: reason(text), noLuck: e.FailedBuild != "" || raced.MatchString(text)}
	if len(open) > 0 {
		slices.Sort(open)
		f.reason = strings.Join(open, ", ") + " did not end: " + f.reason
	}
	r.failures = append(r.failures, f)
}

// raced is in the output of a test with a data race: of package testing, and of the race
// detector where the test did not end. The race is there, also when the next run does not
// meet it.
var raced = regexp.MustCompile(`race detected during execution of test|WARNING: DATA RACE`)

// tells is a line of a test that tells where it comes from; panics have none.
var tells = regexp.MustCompile(`(?m)^(?: {4,}\w+\.go:\d+: .*|panic: .*|WARNING: DATA RACE|signal: .*|exit status .*)$`)

// longestReason is what one line of a terminal holds twice.
const longestReason = 160

// reason is the line of a failed test's output that tells most: the last, before the
// consoles of its nodes.
func reason(text string) string {
	if at := consoles.FindStringIndex(text); at != nil {
		text = text[:at[0]]
	}
	lines := tells.FindAllString(text, -1)
	if len(lines) == 0 {
		return "it gave no reason"
	}
	last := strings.TrimSpace(lines[len(lines)-1])
	if len(last) > longestReason {
		last = strings.ToValidUTF8(last[:longestReason], "") + "..."
	}
	return last
}

// add takes up another result.
func (r *result) add(other result) {
	if r.booted == nil {
		r.booted = map[string]int{}
	}
	r.packages += other.packages
	r.cached += other.cached
	r.passed += other.passed
	r.skipped += other.skipped
	r.failures = append(r.failures, other.failures...)
	r.flaky = append(r.flaky, other.flaky...)
	for how, n := range other.booted {
		r.booted[how] += n
	}
}

// machines says what was booted, and how often.
func (r result) machines() string {
	var each []string
	for _, how := range slices.Sorted(maps.Keys(r.booted)) {
		each = append(each, fmt.Sprintf("%s %d", how, r.booted[how]))
	}
	if each == nil {
		return "nothing"
	}
	return strings.Join(each, ", ")
}

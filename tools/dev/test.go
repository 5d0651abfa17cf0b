package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/config"
)

const (
	// packagesAtOnce is how many packages' unit tests run at the same time. The long ones
	// wait for kernels and clocks more than they compute.
	packagesAtOnce = 4
	// slowest is the package whose tests take longest, four minutes: they begin first, and don't run alone at last.
	slowest = module + "/tools/gbctl"
	// unitTimeout bounds the tests of one package: the longest take two minutes on a
	// machine that has nothing else to do, and these share theirs.
	unitTimeout = 15 * time.Minute
	// kernelTimeout likewise: those of disks take 15 minutes beside an emulated machine.
	kernelTimeout = 30 * time.Minute
	// testBudget is what make test may take where all that it boots is built.
	testBudget = 20 * time.Minute
)

// e2ePhase is the phase of the tests that are chosen.
const e2ePhase = "e2e"

// A phase is one part of the tests.
type phase struct {
	name   string
	what   string
	run    func(ctx context.Context, s *suite) (result, error)
	beside bool      // whether it runs beside the phase before it: one of them waits while the other computes
	begun  time.Time // where it does
}

// A suite is what the phases of one run share.
type suite struct {
	root   string // the checkout
	copied string // its sources, at the place that is the same for all checkouts: the tests run there
	out    io.Writer
	chosen *choice // which end-to-end tests run
	goesOn bool    // after a phase that failed: the halves of the long tests, of which neither stands on the other
	result
	ran []string
}

var phases = []phase{
	{name: "lint", what: "gofmt, go vet, staticcheck", run: lint},
	{name: "unit", what: "unit tests, and tests in namespaces of their own, with -race", run: unit},
	{name: "kernel", what: "tests in a kernel of their own (User Mode Linux)", run: kernelTests, beside: true},
	{name: "fuzz", what: "each fuzz target of changed code for a few seconds", run: fuzzChanged},
	{name: e2ePhase, what: "end-to-end tests: nodes and clusters, booted for real", run: e2eTests},
}

func testCommand() *cobra.Command {
	var only string
	o := choiceOptions{tag: e2eTag}
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Run the tests",
		Long: `Run the tests: all phases, or one. A test that passed here with what it covers is
not run again: go test knows this of those that boot nothing, and the table in
qemu/e2e/due of the end-to-end tests (--all runs all of them). The tests run from
a copy of the checkout, which may be changed meanwhile.

A test that fails is run once more, alone, at the end of its phase. If it passes
then, the run goes on, and its last lines name the test as FLAKY.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return testFrom(cmd.Context(), cmd.OutOrStdout(), o.copied("checkout"), func(ctx context.Context, s *suite) error {
				if only == "" || only == e2ePhase {
					if err := s.choose(ctx, o); err != nil || o.list {
						return err
					}
				}
				return runPhases(ctx, "make "+cmp.Or(only, "test"), phases, s, only)
			})
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "run one phase: lint, unit, kernel, fuzz or e2e")
	o.add(cmd.Flags())
	return cmd
}

// testFrom calls test with a copy of the checkout's sources, which has a name and is for this run alone.
func testFrom(ctx context.Context, out io.Writer, copied string, test func(context.Context, *suite) error) error {
	root, err := prepared(ctx, out, true)
	if err = errors.Join(err, oneForm()); err != nil {
		return err
	}
	sources, err := copySources(ctx, out, root, copied)
	if err != nil {
		return err
	}
	return errors.Join(test(ctx, &suite{root: root, copied: sources.dir, out: out}), sources.close())
}

// runPhases runs them in order. Where later ones stand on the earlier, none begins after one that failed.
func runPhases(ctx context.Context, command string, all []phase, s *suite, only string) error {
	begin := time.Now()
	var not, failedIn []string
	var failed error
	all = slices.Clone(all)
	for i, p := range all {
		stopped := failed != nil && (!s.goesOn || ctx.Err() != nil) && p.begun.IsZero()
		if stopped || only != "" && only != p.name {
			not = append(not, p.name)
			continue
		}
		if i+1 < len(all) && all[i+1].beside && only == "" {
			all[i+1] = s.begin(ctx, all[i+1])
		}
		if err := s.phase(ctx, p); err != nil {
			failed, failedIn = errors.Join(failed, fmt.Errorf("%s: %w", p.name, err)), append(failedIn, p.name)
		}
	}
	switch {
	case failed != nil:
		s.last(fmt.Sprintf("%s: FAILED in %s after %s", command, strings.Join(failedIn, ", "), since(begin)), not)
		return failed
	case s.ran == nil:
		return fmt.Errorf("--only %s: no such phase", only)
	}
	verdict := command + ": passed in " + since(begin)
	if only == "" && !s.goesOn {
		verdict += fmt.Sprintf(" (where everything is built, it may take %s)", testBudget)
	}
	s.last(verdict, not)
	return nil
}

// begin starts a phase beside the one before it. The phase that it returns waits for the end, and prints all then.
func (s *suite) begin(ctx context.Context, p phase) phase {
	own, said := *s, new(bytes.Buffer)
	own.out = said
	var (
		r     result
		err   error
		ended sync.WaitGroup
	)
	do := p.run
	ended.Go(func() { r, err = do(ctx, &own) })
	p.begun = time.Now()
	p.run = func(context.Context, *suite) (result, error) {
		ended.Wait()
		_, failed := said.WriteTo(s.out)
		return r, errors.Join(err, failed)
	}
	return p
}

func since(begin time.Time) string { return time.Since(begin).Round(time.Second).String() }

func (s *suite) phase(ctx context.Context, p phase) error {
	fmt.Fprintf(s.out, "== %s: %s\n", p.name, p.what)
	begin := cmp.Or(p.begun, time.Now())
	r, err := p.run(ctx, s)
	if err == nil && len(r.failures) > 0 {
		err = r.again(ctx, s.out)
	}
	s.add(r)
	if err != nil {
		return err
	}
	s.ran = append(s.ran, p.name)
	fmt.Fprintf(s.out, "== %s: passed in %s", p.name, since(begin))
	if r.packages > 0 {
		fmt.Fprintf(s.out, ": %d packages, of which %d are unchanged since they passed (cached)", r.packages, r.cached)
	}
	fmt.Fprintln(s.out)
	return nil
}

// last prints the last lines of a run: what failed by luck, and what ran at all.
func (s *suite) last(verdict string, not []string) {
	if s.passed+len(s.failures) > 0 {
		fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, len(s.failures), s.skipped)
	}
	for _, f := range s.flaky {
		fmt.Fprintf(s.out, "FLAKY: %s (first failure: %s)\n", f, f.reason)
	}
	list := func(names []string) string { return cmp.Or(strings.Join(names, ", "), "nothing") }
	fmt.Fprintf(s.out, "== %s; complete: %s; not run: %s; booted: %s\n", verdict, list(s.ran), list(not), s.machines())
}

func lint(ctx context.Context, s *suite) (result, error) {
	gofmt := exec.CommandContext(ctx, "gofmt", "-l", ".")
	gofmt.Dir = s.copied
	unformatted, err := gofmt.Output()
	if err != nil {
		return result{}, fmt.Errorf("gofmt: %w", err)
	}
	if len(unformatted) > 0 {
		return result{}, errors.New("not formatted, run gofmt -w on: " + strings.Join(strings.Fields(string(unformatted)), " "))
	}
	if err := lintModule(ctx, s, "."); err != nil {
		return result{}, err
	}
	for _, module := range modules {
		if err := lintModule(ctx, s, module); err != nil {
			return result{}, fmt.Errorf("%s: %w", module, err)
		}
	}
	return result{}, buildForOthers(ctx, s)
}

// modules are modules of their own, which ./... leaves out, with code of ours.
var modules = []string{"qemu/e2e/clients/clientgo", "qemu/e2e/onenode/nfsserver"}

// lintTags are all build tags of our tests.
const lintTags = "-tags=e2e,long,kernel"

// withC is the package that doesn't compile without cgo: a library of it has C code.
const withC = module + "/services/front/sandbox/cmd/sandbox"

// lintModule checks a module with the tools of the main one, which others don't know. Both
// tools keep what they found, by content.
func lintModule(ctx context.Context, s *suite, name string) error {
	dir := filepath.Join(s.copied, name)
	list := exec.CommandContext(ctx, "go", "list", lintTags, "./...")
	list.Dir = dir
	listed, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	find := exec.CommandContext(ctx, "go", "tool", "-n", "staticcheck")
	find.Dir = s.copied
	found, err := find.Output()
	if err != nil {
		return fmt.Errorf("find staticcheck: %w", err)
	}
	all, staticcheck := strings.Fields(string(listed)), strings.TrimSpace(string(found))
	pure := slices.DeleteFunc(slices.Clone(all), func(pkg string) bool { return pkg == withC })
	vetted, err := lintPackages(ctx, s.out, dir, "0", staticcheck, pure)
	if err == nil && len(pure) < len(all) {
		var one int
		one, err = lintPackages(ctx, s.out, dir, "1", staticcheck, []string{withC})
		vetted += one
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(s.out, "clean: %d packages; go vet looked at %d anew and took the others from its cache, as staticcheck does\n", len(all), vetted)
	return nil
}

// lintPackages returns how many packages go vet looked at anew: for each, go vet -x prints a command.
func lintPackages(ctx context.Context, out io.Writer, dir, cgo, staticcheck string, packages []string) (int, error) {
	check := func(program string, args ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, program, append(append(args, lintTags), packages...)...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED="+cgo)
		text, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w\n%s", filepath.Base(program), err, text)
		}
		return text, err
	}
	fmt.Fprintf(out, "+ go vet, staticcheck: %d packages, CGO_ENABLED=%s\n", len(packages), cgo)
	text, err := check("go", "vet", "-x")
	if err != nil {
		_, err = check("go", "vet") // without the commands, for a person to read
	}
	if err == nil {
		_, err = check(staticcheck)
	}
	return strings.Count(string(text), `"VetxOnly": false`), err // not those that are only imported
}

// buildForOthers compiles the client for the other systems that its users have.
func buildForOthers(ctx context.Context, s *suite) error {
	for _, system := range []string{"darwin", "windows"} {
		fmt.Fprintf(s.out, "+ GOOS=%s GOARCH=arm64 go build ./tools/gbctl\n", system)
		cmd := exec.CommandContext(ctx, "go", "build", "-o", os.DevNull, "./tools/gbctl")
		cmd.Dir, cmd.Env = s.copied, append(os.Environ(), "GOOS="+system, "GOARCH=arm64", "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("gbctl for %s: %w: %s", system, err, text)
		}
	}
	return nil
}

// oneForm is the form in which all packages are compiled, but for the race detector: that of the programs that are
// booted. Each other form (with cgo, or with the paths of this machine) takes three minutes of processor time.
func oneForm() error {
	return errors.Join(os.Setenv("CGO_ENABLED", "0"), os.Setenv("GOFLAGS", "-trimpath"))
}

// computes are the packages that only compute: nothing in them, but in the two that aren't meant, runs beside something
// else. The race detector makes computations six times slower.
var computes = regexp.MustCompile(`^` + module + `/(config|image|kernel)(/|$)`)

func onlyComputes(pkg string) bool {
	return computes.MatchString(pkg) && !slices.Contains([]string{module + "/image/progress", module + "/image/squashfs"}, pkg)
}

// unit runs the packages with the race detector, but for those that only compute.
func unit(ctx context.Context, s *suite) (result, error) {
	list := exec.CommandContext(ctx, "go", "list", slowest, "./...")
	list.Dir = s.copied
	listed, err := list.Output()
	if err != nil {
		return result{}, fmt.Errorf("go list: %w", err)
	}
	all := strings.Fields(string(listed))
	args := []string{fmt.Sprintf("-p=%d", packagesAtOnce), "-timeout=" + unitTimeout.String()}
	racing := goTest{dir: s.copied, env: []string{"CGO_ENABLED=1"}, args: append([]string{"-race"}, args...)}
	sum, err := racing.run(ctx, s.out, nil, slices.DeleteFunc(slices.Clone(all), onlyComputes)...)
	if err != nil {
		return sum, err
	}
	others, err := goTest{dir: s.copied, args: args}.run(ctx, s.out, nil, slices.DeleteFunc(all, func(pkg string) bool { return !onlyComputes(pkg) })...)
	sum.add(others)
	return sum, err
}

func goRun(ctx context.Context, dir string, out io.Writer, args ...string) error {
	return run(ctx, dir, out, "go", args...)
}

func run(ctx context.Context, dir string, out io.Writer, program string, args ...string) error {
	name := filepath.Base(program)
	fmt.Fprintf(out, "+ %s %s\n", name, config.Shorten(strings.Join(args, " "), 400)) // not all packages
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	// A program and what it has started end together: the go command hands no signal on to its tests. The host
	// processes of clusters, which have sessions of their own, see their test end, and take down what it booted.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM} // this process may be killed
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 30 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return nil
}

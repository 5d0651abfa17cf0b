package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

const (
	// packagesAtOnce is how many packages' unit tests run at the same time. The long ones
	// wait for kernels and clocks more than they compute.
	packagesAtOnce = 4
	// unitTimeout bounds the tests of one package: the longest take two minutes on a
	// machine that has nothing else to do, and these share theirs.
	unitTimeout = 40 * time.Minute
	// storyTimeout bounds all tests that boot machines, on two slow cores.
	storyTimeout = 50 * time.Minute
	// longNeeds is what the long stories may take: within less they aren't begun.
	longNeeds = 40 * time.Minute
	// testBudget is what the tests may take where all that they boot is built, without
	// those that run only if they are asked for.
	testBudget = 25 * time.Minute
	// lastWords is the part of a limit, one in so many, that is kept for tests that don't
	// end in time to say where they are and to end. Half a minute is given to that.
	lastWords = 60
)

// A phase is one part of the tests.
type phase struct {
	name string
	what string
	run  func(ctx context.Context, root string, out io.Writer) error
	// apart: only if it is asked for.
	apart bool
	// needs is how long it may take, where that is asked.
	needs time.Duration
}

var phases = []phase{
	{name: "lint", what: "gofmt, go vet, staticcheck", run: lint},
	{name: "unit", what: "unit tests and tests in network namespaces, with -race", run: unit},
	{name: "fuzz", what: "each fuzz target for a few seconds", run: func(ctx context.Context, root string, out io.Writer) error {
		return fuzz(ctx, root, out, fuzzBriefly)
	}},
	{name: "stories", what: "machines and clusters, booted for real", run: stories},
	{name: "long", what: "the stories that take many minutes", run: longStories, apart: true, needs: longNeeds},
}

func testCommand() *cobra.Command {
	var only string
	var within time.Duration
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Run the tests",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, out := cmd.Context(), cmd.OutOrStdout()
			root, err := repository()
			if err != nil {
				return err
			}
			if within == 0 && cmd.Flags().Changed("within") {
				within = -1 // none left isn't no limit
			}
			if err := setup(ctx, out, true); err != nil {
				return err
			}
			return runPhases(ctx, phases, root, out, only, within)
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "run one phase: lint, unit, fuzz, stories or long")
	cmd.Flags().DurationVar(&within, "within", 0, "with --only long: run them only if that is time enough, and let them fail at its end")
	return cmd
}

// runPhases runs them in order and stops at the first that fails: later ones
// take long and stand on the earlier.
func runPhases(ctx context.Context, all []phase, root string, out io.Writer, only string, within time.Duration) error {
	begin := time.Now()
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within-within/lastWords)
		defer cancel()
	}
	known, ran := false, 0
	for _, p := range all {
		if only != p.name && (only != "" || p.apart) {
			continue
		}
		known = true
		if within != 0 && within < p.needs {
			fmt.Fprintf(out, "== %s: LEFT OUT for lack of time, and so not tested: %s. It may take %s, and there are %s.\n", p.name, p.what, p.needs, max(within, 0))
			continue
		}
		fmt.Fprintf(out, "== %s: %s\n", p.name, p.what)
		start := time.Now()
		err := p.run(ctx, root, out)
		took := time.Since(start).Round(time.Second)
		if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("%s: not done within %s, and ended: what hung or was slow is above: %w", p.name, within, err)
		}
		if err != nil {
			return fmt.Errorf("%s (after %s): %w", p.name, took, err)
		}
		ran++
		fmt.Fprintf(out, "== %s: passed in %s\n", p.name, took)
	}
	if !known {
		return fmt.Errorf("--only %s: no such phase", only)
	}
	if ran > 1 {
		fmt.Fprintf(out, "== all %d: passed in %s; where everything is built, it may take %s\n", ran, time.Since(begin).Round(time.Second), testBudget)
	}
	return nil
}

func lint(ctx context.Context, root string, out io.Writer) error {
	gofmt := exec.CommandContext(ctx, "gofmt", "-l", ".")
	gofmt.Dir = root
	unformatted, err := gofmt.Output()
	if err != nil {
		return fmt.Errorf("gofmt: %w", err)
	}
	if len(unformatted) > 0 {
		return errors.New("not formatted, run gofmt -w on: " + strings.Join(strings.Fields(string(unformatted)), " "))
	}
	if err := goRun(ctx, root, out, "vet", "-tags=story,long", "./..."); err != nil {
		return err
	}
	if err := goRun(ctx, root, out, "tool", "staticcheck", "-tags=story,long", "./..."); err != nil {
		return err
	}
	for _, module := range modules {
		if err := lintModule(ctx, root, module, out); err != nil {
			return fmt.Errorf("%s: %w", module, err)
		}
	}
	return nil
}

// modules are modules of their own, which ./... leaves out, with code of ours.
var modules = []string{"qemu/stories/clients/clientgo", "qemu/stories/onenode/nfsserver"}

// lintModule checks a module with the tools of this one, which it doesn't know.
func lintModule(ctx context.Context, root, module string, out io.Writer) error {
	dir := filepath.Join(root, module)
	if err := goRun(ctx, dir, out, "vet", "-tags=story", "./..."); err != nil {
		return err
	}
	find := exec.CommandContext(ctx, "go", "tool", "-n", "staticcheck")
	find.Dir = root
	program, err := find.Output()
	if err != nil {
		return fmt.Errorf("find staticcheck: %w", err)
	}
	return run(ctx, dir, out, strings.TrimSpace(string(program)), "-tags=story", "./...")
}

func unit(ctx context.Context, root string, out io.Writer) error {
	return goRun(ctx, root, out, "test", "-race", fmt.Sprintf("-p=%d", packagesAtOnce), "-timeout="+unitTimeout.String(), "./...")
}

// stories runs those with containers at native speed, which mostly wait, some at once,
// and then those with machines, where emulation takes all processors.
func stories(ctx context.Context, root string, out io.Writer) error {
	all, err := storyFolders(root)
	if err != nil {
		return err
	}
	var containers, machines, tests []string
	for _, f := range all {
		tests = append(tests, f.short...)
		switch {
		case len(f.short) == 0:
		case f.machines:
			machines = append(machines, f.path)
		default:
			containers = append(containers, f.path)
		}
	}
	slices.Reverse(containers) // the real tests of etcd take longest: they mustn't begin when all else ends
	if err := bootTests(ctx, root, out, containersAtOnce, containers, tests, "-tags=story"); err != nil {
		return err
	}
	return bootTests(ctx, root, out, 1, machines, tests, "-tags=story")
}

// longStories are told one by one: most boot machines.
func longStories(ctx context.Context, root string, out io.Writer) error {
	all, err := storyFolders(root)
	if err != nil {
		return err
	}
	var folders, tests []string
	for _, f := range all {
		if len(f.long) > 0 {
			folders, tests = append(folders, f.path), append(tests, f.long...)
		}
	}
	return bootTests(ctx, root, out, 1, folders, tests, "-tags=story,long")
}

const (
	// storyTag begins the first line of all tests that boot nodes.
	storyTag = "//go:build story"
	// longTag is the first line of the tests that only longStories runs.
	longTag = "//go:build story && long\n"
	// machineWord is in the files of tests that boot machines.
	machineWord = "qemu.QEMU"
	// containersAtOnce is how many stories with containers run at the same time. They mostly wait.
	containersAtOnce = 2
)

// storyRoots are where such tests are: those of a service run what it needs without a node.
var storyRoots = []string{"qemu/stories", "services"}

// A storyFolder is a package with tests that boot nodes, or real parts of one.
type storyFolder struct {
	path        string
	short, long []string // names of its tests
	machines    bool     // whether short ones boot machines
}

var testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// storyFolders finds them all, in order.
func storyFolders(root string) ([]storyFolder, error) {
	folders := map[string]storyFolder{}
	look := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				return filepath.SkipDir // the story beside it runs it
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(text), storyTag) {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		f := folders[folder]
		f.path = "./" + folder
		tests := testFunction.FindAllStringSubmatch(string(text), -1)
		switch long := strings.HasPrefix(string(text), longTag); {
		case long:
			for _, name := range tests {
				f.long = append(f.long, name[1])
			}
		case len(tests) > 0:
			for _, name := range tests {
				f.short = append(f.short, name[1])
			}
			f.machines = f.machines || strings.Contains(string(text), machineWord)
		}
		folders[folder] = f
		return err
	}
	for _, dir := range storyRoots {
		if err := filepath.WalkDir(filepath.Join(root, dir), look); err != nil {
			return nil, err
		}
	}
	return slices.SortedFunc(maps.Values(folders), func(a, b storyFolder) int { return strings.Compare(a.path, b.path) }), nil
}

// bootTests builds everything first, so that a test's time is the test's. It runs tests by
// name: the unit tests beside them have been run.
func bootTests(ctx context.Context, root string, out io.Writer, atOnce int, packages, tests []string, tags string) error {
	if len(packages) == 0 {
		return nil
	}
	made, err := devcluster.Build(ctx, root, out, image.Build)
	if err != nil {
		return err
	}
	// Tests of a single room start the programs themselves.
	programs := made.Components["etcd"] + string(os.PathListSeparator) + made.Components["kubernetes"]
	if err := os.Setenv("GARBOARD_COMPONENTS", programs); err != nil {
		return err
	}
	args := append([]string{"test", "-v", "-count=1", fmt.Sprintf("-p=%d", atOnce), "-timeout=" + storyTimeout.String(), tags, "-run=^(" + strings.Join(tests, "|") + ")$"}, packages...)
	return goRun(ctx, root, out, args...)
}

func goRun(ctx context.Context, dir string, out io.Writer, args ...string) error {
	return run(ctx, dir, out, "go", args...)
}

func run(ctx context.Context, dir string, out io.Writer, program string, args ...string) error {
	name := filepath.Base(program)
	fmt.Fprintf(out, "+ %s %s\n", name, strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.Cancel = func() error { return interrupt(ctx, cmd.Process) }
	cmd.WaitDelay = 30 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return nil
}

// interrupt ends a program and what it has started: the go command waits for its tests and
// hands no signal on. Where time has run out, they say what they were doing: a Go
// program that gets SIGQUIT prints its stacks. The host processes of clusters see their
// test end, and take down what it booted.
func interrupt(ctx context.Context, p *os.Process) error {
	signal := syscall.SIGINT
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		signal = syscall.SIGQUIT
	}
	below, err := children(p.Pid)
	for _, pid := range below {
		if gone := syscall.Kill(pid, signal); !errors.Is(gone, syscall.ESRCH) {
			err = errors.Join(err, gone)
		}
	}
	return errors.Join(err, p.Signal(signal))
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

const (
	// packagesAtOnce is how many packages' unit tests run at the same time. The long ones
	// wait for kernels and clocks more than they compute.
	packagesAtOnce = 4
	// unitTimeout bounds the tests of one package: the longest take two minutes on a
	// machine that has nothing else to do, and these share theirs.
	unitTimeout = 40 * time.Minute
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
}

// leftOut names the tests of a phase for which there was no time.
type leftOut []string

func (l leftOut) Error() string {
	return "LEFT OUT for lack of time, and so not tested: " + strings.Join(l, ", ")
}

var phases = []phase{
	{name: "lint", what: "gofmt, go vet, staticcheck", run: lint},
	{name: "unit", what: "unit tests and tests in network namespaces, with -race", run: unit},
	{name: "fuzz", what: "each fuzz target for a few seconds", run: func(ctx context.Context, root string, out io.Writer) error {
		return fuzz(ctx, root, out, fuzzBriefly)
	}},
	{name: "stories", what: "machines and clusters, booted for real", run: stories},
	{name: "long", what: "the stories that take many minutes", run: longStories, apart: true},
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
			if within <= 0 && cmd.Flags().Changed("within") {
				within = 1 // none left isn't no limit
			}
			if err := setup(ctx, out, true); err != nil {
				return err
			}
			return runPhases(ctx, phases, root, out, only, within)
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "run one phase: lint, unit, fuzz, stories or long")
	cmd.Flags().DurationVar(&within, "within", 0, "with --only long: run those that fit into this time, name the others, and let what is not done at its end fail")
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
		fmt.Fprintf(out, "== %s: %s\n", p.name, p.what)
		start := time.Now()
		err := p.run(ctx, root, out)
		took := time.Since(start).Round(time.Second)
		var left leftOut
		if errors.As(err, &left) {
			fmt.Fprintf(out, "== %s: what there was time for passed in %s. %v\n", p.name, took, left)
			continue
		}
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

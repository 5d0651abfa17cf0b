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
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

// storyTimeout bounds all tests that boot machines, on two slow cores.
const storyTimeout = 50 * time.Minute

// A phase is one part of `make test`.
type phase struct {
	name string
	what string
	run  func(ctx context.Context, root string, out io.Writer) error
}

var phases = []phase{
	{"lint", "gofmt, go vet, staticcheck", lint},
	{"unit", "unit tests and tests in network namespaces, with -race", unit},
	{"fuzz", "each fuzz target for a few seconds", func(ctx context.Context, root string, out io.Writer) error {
		return fuzz(ctx, root, out, fuzzBriefly)
	}},
	{"stories", "machines and clusters, booted for real", stories},
}

func testCommand() *cobra.Command {
	var only string
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
			if err := setup(ctx, out, true); err != nil {
				return err
			}
			return runPhases(ctx, root, out, only)
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "run one phase: lint, unit, fuzz or stories")
	return cmd
}

// runPhases runs them in order and stops at the first that fails: later ones
// take long and stand on the earlier.
func runPhases(ctx context.Context, root string, out io.Writer, only string) error {
	known := false
	for _, p := range phases {
		if only != "" && only != p.name {
			continue
		}
		known = true
		fmt.Fprintf(out, "== %s: %s\n", p.name, p.what)
		start := time.Now()
		if err := p.run(ctx, root, out); err != nil {
			return fmt.Errorf("%s (after %s): %w", p.name, time.Since(start).Round(time.Second), err)
		}
		fmt.Fprintf(out, "== %s: passed in %s\n", p.name, time.Since(start).Round(time.Second))
	}
	if !known {
		return fmt.Errorf("--only %s: no such phase", only)
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
	if err := goRun(ctx, root, out, "vet", "-tags=story", "./..."); err != nil {
		return err
	}
	if err := goRun(ctx, root, out, "tool", "staticcheck", "-tags=story", "./..."); err != nil {
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
var modules = []string{"qemu/stories/clients/clientgo"}

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
	return goRun(ctx, root, out, "test", "-race", "./...")
}

// stories builds everything first, so that a test's time is the test's.
func stories(ctx context.Context, root string, out io.Writer) error {
	made, err := devcluster.Build(ctx, root, out, image.Build)
	if err != nil {
		return err
	}
	// Tests of a single room start the programs themselves.
	programs := made.Components["etcd"] + string(os.PathListSeparator) + made.Components["kubernetes"]
	if err := os.Setenv("GARBOARD_COMPONENTS", programs); err != nil {
		return err
	}
	// One at a time: a guest under software emulation takes both cores.
	return goRun(ctx, root, out, "test", "-tags=story", "-v", "-count=1", "-p=1", "-timeout="+storyTimeout.String(), "./qemu/stories/...", "./services/apid", "./services/controlplane", "./services/doctor", "./services/etcd")
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
	// Tests get the chance to take down what they booted before they are killed.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return nil
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// fuzzBriefly is how long each target runs in `make test`: long enough for tens of
// thousands of inputs, and for whatever a change has broken grossly.
const fuzzBriefly = 3 * time.Second

// A fuzzTarget is one function of a test file.
type fuzzTarget struct{ folder, name string }

var fuzzFunction = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// fuzzTargets finds all of the repository, in order.
func fuzzTargets(root string) ([]fuzzTarget, error) {
	var found []fuzzTarget
	err := testFiles(root, ".", func(file string, text []byte) error {
		for _, m := range fuzzFunction.FindAllSubmatch(text, -1) {
			found = append(found, fuzzTarget{folderOf(file), string(m[1])})
		}
		return nil
	})
	if err == nil && len(found) == 0 {
		err = errors.New("no fuzz targets found")
	}
	slices.SortStableFunc(found, func(a, b fuzzTarget) int { return strings.Compare(a.folder+a.name, b.folder+b.name) })
	return found, err
}

// fuzz runs each target for a time. Inputs that it found interesting are kept in
// Go's build cache; one that fails is written below testdata, to be committed.
func fuzz(ctx context.Context, root string, out io.Writer, each time.Duration) error {
	targets, err := fuzzTargets(root)
	if err != nil {
		return err
	}
	for _, target := range targets {
		var said bytes.Buffer
		err := goRun(ctx, root, io.MultiWriter(out, &said), "test", "-trimpath", "-run=^$", "-fuzz=^"+target.name+"$", "-fuzztime="+each.String(), target.folder)
		if err != nil && ctx.Err() == nil && onlyTimeIsUp(said.String()) {
			fmt.Fprintf(out, "%s has failed with nothing but the end of its time, which is a race in Go (golang.org/issue/75804)\n", target.name)
			err = nil
		}
		if err != nil {
			return fmt.Errorf("%s in %s: %w", target.name, target.folder, err)
		}
	}
	return nil
}

// failures are what go test says of targets that failed, each with what it says of it.
var failures = regexp.MustCompile(`(?m)^ *--- FAIL: .*\n((?: {4,}.*\n)*)`)

// onlyTimeIsUp reports whether a target failed only because -fuzztime ended while Go's
// coordinator looked, which takes that for an error now and then before Go 1.27. What
// fails by itself has an input that is written down.
func onlyTimeIsUp(said string) bool {
	all := failures.FindAllStringSubmatch(said, -1)
	return len(all) == 1 && strings.TrimSpace(all[0][1]) == context.DeadlineExceeded.Error() && !strings.Contains(said, "Failing input")
}

func fuzzCommand() *cobra.Command {
	var each time.Duration
	cmd := &cobra.Command{
		Use:   "fuzz",
		Short: "Fuzz every target for a time",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := repository()
			if err != nil {
				return err
			}
			return fuzz(cmd.Context(), root, cmd.OutOrStdout(), each)
		},
	}
	cmd.Flags().DurationVar(&each, "each", time.Minute, "how long each target runs")
	return cmd
}

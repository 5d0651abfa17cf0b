package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
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
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == ".git" || entry.Name() == "out") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		for _, m := range fuzzFunction.FindAllSubmatch(text, -1) {
			found = append(found, fuzzTarget{"./" + folder, string(m[1])})
		}
		return err
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
		if err := goRun(ctx, root, out, "test", "-run=^$", "-fuzz=^"+target.name+"$", "-fuzztime="+each.String(), target.folder); err != nil {
			return fmt.Errorf("%s in %s: %w", target.name, target.folder, err)
		}
	}
	return nil
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

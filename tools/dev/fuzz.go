package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
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

// fuzzAll runs each target for a time.
func fuzzAll(ctx context.Context, root string, out io.Writer, each time.Duration) error {
	targets, err := fuzzTargets(root)
	for _, target := range targets {
		if err == nil {
			err = target.fuzz(ctx, root, out, each)
		}
	}
	return err
}

// fuzzChanged runs briefly each target whose test program isn't the one that it passed with before.
func fuzzChanged(ctx context.Context, s *suite) (result, error) {
	targets, err := fuzzTargets(s.root)
	if err != nil {
		return result{}, err
	}
	passed, err := testCache("fuzzed")
	if err == nil {
		err = os.MkdirAll(passed, 0o755)
	}
	programs, err := programHashes(ctx, s, targets, err)
	if err != nil {
		return result{}, err
	}
	same := 0
	for _, target := range targets {
		mark, program := filepath.Join(passed, strings.ReplaceAll(target.folder, "/", "_")+"."+target.name), programs[target.folder]
		if before, err := os.ReadFile(mark); err == nil && string(before) == program {
			same++
			continue
		}
		if err := target.fuzz(ctx, s.root, s.out, fuzzBriefly); err != nil {
			return result{}, err
		}
		if err := os.WriteFile(mark, []byte(program), 0o644); err != nil {
			return result{}, err
		}
	}
	fmt.Fprintf(s.out, "%d of %d targets have passed with the same programs before\n", same, len(targets))
	return result{}, nil
}

// programHashes are those of the folders' test programs, unless there was an error before.
func programHashes(ctx context.Context, s *suite, targets []fuzzTarget, err error) (map[string]string, error) {
	hashes := map[string]string{}
	for _, target := range targets {
		if err != nil || hashes[target.folder] != "" {
			continue
		}
		path := filepath.Join(os.TempDir(), fmt.Sprintf("fuzzed-%d.test", os.Getpid()))
		if err = goRun(ctx, s.root, io.Discard, "test", "-trimpath", "-c", "-o", path, target.folder); err == nil {
			var program []byte
			program, err = os.ReadFile(path)
			hashes[target.folder] = fmt.Sprintf("%x", sha256.Sum256(program))
			err = errors.Join(err, os.Remove(path))
		}
	}
	return hashes, err
}

// fuzz runs a target for a time. Inputs that it found interesting are kept in
// Go's build cache; one that fails is written below testdata, to be committed.
func (t fuzzTarget) fuzz(ctx context.Context, root string, out io.Writer, each time.Duration) error {
	var said bytes.Buffer
	err := goRun(ctx, root, io.MultiWriter(out, &said), "test", "-trimpath", "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+each.String(), t.folder)
	if err != nil && ctx.Err() == nil && onlyTimeIsUp(said.String()) {
		fmt.Fprintf(out, "%s has failed with nothing but the end of its time, which is a race in Go (golang.org/issue/75804)\n", t.name)
		err = nil
	}
	if err != nil {
		return fmt.Errorf("%s in %s: %w", t.name, t.folder, err)
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
			return fuzzAll(cmd.Context(), root, cmd.OutOrStdout(), each)
		},
	}
	cmd.Flags().DurationVar(&each, "each", time.Minute, "how long each target runs")
	return cmd
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// mostAgain is how many failed tests of a phase get a second chance. More is no luck, and to
// repeat each of them alone would take longer than to read why the first failed.
const mostAgain = 10

// again runs each test that failed once more, one after the other, with no test of the phase beside it.
// Those that pass now are flaky; an error names the others.
func (r *result) again(ctx context.Context, out io.Writer) error {
	failures := slices.SortedFunc(slices.Values(r.failures), func(a, b failure) int { return strings.Compare(a.String(), b.String()) })
	if len(failures) > mostAgain {
		return fmt.Errorf("%d tests failed, and no more than %d are run again:%s", len(failures), mostAgain, lines(failures))
	}
	r.failures = nil
	for _, f := range failures {
		if f.noLuck {
			r.failures = append(r.failures, f)
			continue
		}
		fmt.Fprintf(out, "== again, alone: %s\n", f)
		second, err := f.again(ctx, out)
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), err)
		}
		if err != nil || len(second.failures) > 0 || second.passed == 0 {
			r.failures = append(r.failures, f)
			continue
		}
		second.packages, second.cached = 0, 0 // counted already
		r.add(second)
		r.flaky = append(r.flaky, f)
	}
	if len(r.failures) > 0 {
		return fmt.Errorf("%d failed, also when they ran again alone:%s", len(r.failures), lines(r.failures))
	}
	return nil
}

func lines(failures []failure) string {
	var all strings.Builder
	for _, f := range failures {
		fmt.Fprintf(&all, "\n  %s: %s", f, f.reason)
	}
	return all.String()
}

func (f failure) again(ctx context.Context, out io.Writer) (result, error) {
	once := f.in
	once.args = append(append([]string(nil), f.in.args...), "-count=1", "-p=1")
	if f.test != "" {
		return once.run(ctx, out, []string{f.test}, f.pkg)
	}
	if f.run != "" {
		once.args = append(once.args, "-run="+f.run)
	}
	return once.run(ctx, out, nil, f.pkg)
}

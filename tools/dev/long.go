package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu/e2e/due"
	"github.com/spf13/cobra"
)

// halves are the phases of the long tests.
var halves = []phase{
	{name: "containers", what: "long end-to-end tests with nodes in containers", run: func(ctx context.Context, s *suite) (result, error) {
		return booted(ctx, s, longTag, longTimeout, containerParts, image.Cloud)
	}},
	{name: "machines", what: "those with virtual machines", run: func(ctx context.Context, s *suite) (result, error) {
		return booted(ctx, s, longTag, machineTimeout, []bootPart{machinePart}, image.Cloud, image.Generic)
	}},
}

// longOptions say which long tests run.
type longOptions struct {
	base, tests string
	all, list   bool
}

func testLongCommand() *cobra.Command {
	var o longOptions
	cmd := &cobra.Command{
		Use:   "test-long",
		Short: "Run the long tests that are due",
		Long: `Run the long tests that are due: those that failed, that haven't passed since
something that they cover was changed, or that never ran here and cover something
that was changed since a commit (--base). The table of what each test covers is in
qemu/e2e/due. A comment, a document and a unit test make nothing due.

The result of each test is kept in the user's cache directory when the test ends.
The tests run from a copy of the checkout, which may be changed meanwhile.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return testLong(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.base, "base", "", "the commit that the change began at (default: where the branch left origin/main, or the newest that is 4 hours old)")
	f.StringVar(&o.tests, "run", "", "run the tests whose names match this regular expression, due or not")
	f.BoolVar(&o.all, "all", false, "run all")
	f.BoolVar(&o.list, "list", false, "only print which tests are due, and why")
	return cmd
}

// A longRun is what one run of the long tests needs. Its methods work for nil: other tests
// are all wanted, and their results aren't kept.
type longRun struct {
	tests   map[string]due.Test // that run, by name
	content due.Content
	commit  string
	results due.Results
	out     io.Writer
}

func (l *longRun) wants(t bootTest) bool {
	if l == nil {
		return true
	}
	_, wanted := l.tests[longTest(t).String()]
	return wanted
}

// ended keeps the result of a test.
func (l *longRun) ended(test string, took time.Duration, failure string) {
	if l == nil {
		return
	}
	err := l.results.Add(test, due.Result{
		Commit: l.commit, Covered: l.tests[test].Covered(l.content), Passed: failure == "", When: time.Now(), Took: took, FirstFailure: failure,
	})
	if err != nil {
		fmt.Fprintln(l.out, "warning:", err)
	}
}

func longTest(t bootTest) due.Test {
	return due.Test{Folder: strings.TrimPrefix(t.folder, "./"), Name: t.name, Files: t.files}
}

func testLong(ctx context.Context, out io.Writer, o longOptions) error {
	name, err := regexp.Compile(o.tests)
	if err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	root, err := prepared(ctx, out, true)
	if err != nil {
		return err
	}
	sources, err := copySources(ctx, out, root, "long")
	if err != nil {
		return err
	}
	defer sources.close()
	results, err := testCache("results")
	if err != nil {
		return err
	}
	l := &longRun{tests: map[string]due.Test{}, results: due.Results(results), out: out}
	if l.content, err = due.Read(sources.dir); err != nil {
		return err
	}
	if l.commit, err = git(ctx, root, "describe", "--always", "--dirty=+", "--exclude=*"); err != nil {
		return err
	}
	base, err := baseOf(ctx, root, o.base)
	if err != nil {
		return err
	}
	former, err := due.At(ctx, root, base, l.content)
	if err != nil {
		return err
	}
	all, err := bootTests(sources.dir)
	if err != nil {
		return err
	}
	choose := func(test due.Test, why string) string {
		switch {
		case o.tests != "":
			return map[bool]string{true: "asked for"}[name.MatchString(test.Name)]
		case o.all:
			return cmp.Or(why, "asked for")
		}
		return why
	}
	if err := l.choose(all, former, base, choose); err != nil {
		return err
	}
	if o.list || len(l.tests) == 0 {
		return nil
	}
	return runPhases(ctx, "make test-long", halves, &suite{root: sources.dir, copied: sources.dir, out: out, long: l}, "")
}

// choose finds the tests that run, and prints them with their reasons.
func (l *longRun) choose(all []bootTest, former due.Content, base string, choose func(due.Test, string) string) error {
	table := tabwriter.NewWriter(l.out, 0, 0, 2, ' ', 0)
	var known time.Duration
	var count, untimed int
	for _, machine := range []bool{false, true} {
		half := halves[map[bool]int{true: 1}[machine]].name
		for _, t := range all {
			if t.tag != longTag || t.machine != machine {
				continue
			}
			count++
			test := longTest(t)
			last, err := l.results.Last(test.String())
			if err != nil {
				return err
			}
			why := choose(test, due.Why(test, last, l.content, former, base))
			if why == "" {
				continue
			}
			l.tests[test.String()] = test
			took := "-"
			if last != nil {
				took = last.Took.Round(time.Second).String()
				known += last.Took
			} else {
				untimed++
			}
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", half, test, took, why)
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	summary := fmt.Sprintf("%d of %d long tests; base %s", len(l.tests), count, base)
	if len(l.tests) > untimed {
		summary += fmt.Sprintf("; those that ran here before took %s", known.Round(time.Second))
	}
	if untimed > 0 {
		summary += fmt.Sprintf("; %d never ran here", untimed)
	}
	_, err := fmt.Fprintln(l.out, summary)
	return err
}

// baseAge is how old a commit is that a change began at, where no branch says so.
const baseAge = 4 * time.Hour

// baseOf is the commit that the change began at.
func baseOf(ctx context.Context, root, asked string) (string, error) {
	if asked != "" {
		return git(ctx, root, "rev-parse", "--short", "--verify", asked+"^{commit}")
	}
	if base, err := git(ctx, root, "merge-base", "origin/main", "HEAD"); err == nil {
		return git(ctx, root, "rev-parse", "--short", base)
	}
	base, err := git(ctx, root, "rev-list", "-1", "--abbrev-commit", "--before="+time.Now().Add(-baseAge).Format(time.RFC3339), "HEAD")
	if err == nil && base == "" {
		err = errors.New("no commit is 4 hours old: name one with BASE=, or run all with ALL=1")
	}
	return base, err
}

// git is a line that git prints.
func git(ctx context.Context, root string, args ...string) (string, error) {
	line, err := due.Git(ctx, root, args...)
	return strings.TrimSpace(line), err
}

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
	"github.com/spf13/pflag"
)

// halves are the phases of the long tests.
var halves = []phase{
	{name: "containers", what: "long end-to-end tests with nodes in containers", run: func(ctx context.Context, s *suite) (result, error) {
		return booted(ctx, s, longTag, longTimeout, longContainerParts, image.Cloud)
	}},
	{name: "machines", what: "those with virtual machines", run: func(ctx context.Context, s *suite) (result, error) {
		return booted(ctx, s, longTag, machineTimeout, []bootPart{machinePart}, image.Cloud, image.Generic)
	}},
}

// choiceOptions say which end-to-end tests run.
type choiceOptions struct {
	tag         string // of the tests that are chosen from
	base, tests string
	all, list   bool
}

// copied is the name of the copy that the tests run from. A list has its own: it doesn't wait for tests that run.
func (o *choiceOptions) copied(name string) string {
	if o.list {
		return "list"
	}
	return name
}

func (o *choiceOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.tests, "run", "", "run the end-to-end tests whose names match this regular expression, due or not")
	f.BoolVar(&o.all, "all", false, "run all end-to-end tests, due or not")
	f.BoolVar(&o.list, "list", false, "only print which end-to-end tests are due, and why")
}

func testLongCommand() *cobra.Command {
	o := choiceOptions{tag: longTag}
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
		RunE: func(cmd *cobra.Command, _ []string) error {
			return testFrom(cmd.Context(), cmd.OutOrStdout(), o.copied("long"), func(ctx context.Context, s *suite) error {
				if err := s.choose(ctx, o); err != nil || o.list || len(s.chosen.tests) == 0 {
					return err
				}
				s.goesOn = true
				return runPhases(ctx, "make test-long", halves, s, "")
			})
		},
	}
	o.add(cmd.Flags())
	cmd.Flags().StringVar(&o.base, "base", "", "the commit that the change began at (default: where the branch left origin/main, or the newest that is 4 hours old)")
	return cmd
}

// A choice is which end-to-end tests run. It keeps their results.
type choice struct {
	tests   map[string]due.Test // that run, by name
	content due.Content
	commit  string
	results due.Results
	out     io.Writer
}

func (c *choice) wants(t bootTest) bool {
	_, wanted := c.tests[dueTest(t).String()]
	return wanted
}

// ended keeps the result of a test.
func (c *choice) ended(test string, took time.Duration, failure string) {
	err := c.results.Add(test, due.Result{
		Commit: c.commit, Covered: c.tests[test].Covered(c.content), Passed: failure == "", When: time.Now(), Took: took, FirstFailure: failure,
	})
	if err != nil {
		fmt.Fprintln(c.out, "warning:", err)
	}
}

func dueTest(t bootTest) due.Test {
	return due.Test{Folder: strings.TrimPrefix(t.folder, "./"), Name: t.name, Files: t.files}
}

// choose finds the tests that run, and prints them with their reasons.
func (s *suite) choose(ctx context.Context, o choiceOptions) error {
	name, err := regexp.Compile(o.tests)
	if err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	results, err := testCache("results")
	if err != nil {
		return err
	}
	c := &choice{tests: map[string]due.Test{}, results: due.Results(results), out: s.out}
	if c.content, err = due.Read(s.copied); err != nil {
		return err
	}
	if c.commit, err = git(ctx, s.root, "describe", "--always", "--dirty=+", "--exclude=*"); err != nil {
		return err
	}
	base, former := "", due.Content(nil)
	if o.tag == longTag {
		if base, err = baseOf(ctx, s.root, o.base); err == nil {
			former, err = due.At(ctx, s.root, base, c.content)
		}
		if err != nil {
			return err
		}
	}
	all, err := bootTests(s.copied)
	if err != nil {
		return err
	}
	s.chosen = c
	return c.choose(all, o.tag, base, func(test due.Test, last *due.Result) string {
		why := due.Why(test, last, c.content, former, base)
		switch {
		case o.tests != "":
			return map[bool]string{true: "asked for"}[name.MatchString(test.Name)]
		case o.all:
			return cmp.Or(why, "asked for")
		}
		return why
	})
}

func (c *choice) choose(all []bootTest, tag, base string, why func(due.Test, *due.Result) string) error {
	table := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	var known time.Duration
	var count, untimed int
	for _, machine := range []bool{false, true} {
		half := halves[map[bool]int{true: 1}[machine]].name
		for _, t := range all {
			if t.tag != tag || t.machine != machine {
				continue
			}
			count++
			test := dueTest(t)
			last, err := c.results.Last(test.String())
			if err != nil {
				return err
			}
			reason := why(test, last)
			if reason == "" {
				continue
			}
			c.tests[test.String()] = test
			took := "-"
			if last != nil {
				took = last.Took.Round(time.Second).String()
				known += last.Took
			} else {
				untimed++
			}
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", half, test, took, reason)
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	summary := fmt.Sprintf("%d of %d end-to-end tests", len(c.tests), count)
	if base != "" {
		summary = fmt.Sprintf("%d of %d long tests; base %s", len(c.tests), count, base)
	}
	if len(c.tests) > untimed {
		summary += fmt.Sprintf("; those that ran here before took %s", known.Round(time.Second))
	}
	if untimed > 0 {
		summary += fmt.Sprintf("; %d never ran here", untimed)
	}
	_, err := fmt.Fprintln(c.out, summary)
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

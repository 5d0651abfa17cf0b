package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// lastSaid is how many of a test's lines are repeated.
const lastSaid = 5

var (
	// speaks says which test the following lines belong to.
	speaks = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S+)$`)
	// spoken is what a test logs, or fails with: its first line. Both look the same.
	spoken = regexp.MustCompile(`^ {4,}\w+\.go:\d+: `)
	// consoles begin the part that is longer than a screen (qemu/e2e/e2etest).
	consoles = regexp.MustCompile(`(?m)^ {4,}\w+\.go:\d+: the console of `)
	// failed is the result of a test or, indented, of a part of the one above.
	failed = regexp.MustCompile(`^ *--- FAIL: (\S+) `)
	ended  = regexp.MustCompile(`^ *--- [A-Z]+: `)
)

// withReasons is the output of a test ("go test -v"). Where it failed, and consoles of its
// nodes hide the reason some hundred lines above, what it and its failed parts printed last
// before them is repeated right before the results.
func withReasons(text string) string {
	printed := map[string][]string{} // at most lastSaid, by test
	var current string
	var hidden bool
	var names []string
	results := -1
	lines := slices.Collect(strings.Lines(text))
	for i, line := range lines {
		if m := speaks.FindStringSubmatch(strings.TrimSuffix(line, "\n")); m != nil {
			current = m[1]
		}
		if m := failed.FindStringSubmatch(line); m != nil {
			names = append(names, m[1])
		}
		switch {
		case ended.MatchString(line) && results < 0 && hidden:
			results = i
		case consoles.MatchString(line):
			hidden = true
		case spoken.MatchString(line) && !hidden:
			of := append(printed[current], line)
			printed[current] = of[max(len(of)-lastSaid, 0):]
		}
	}
	if results < 0 || names == nil {
		return text
	}
	var repeated strings.Builder
	for _, name := range names {
		if of := printed[name]; len(of) > 0 {
			fmt.Fprintf(&repeated, "What %s printed before these consoles:\n%s", name, strings.Join(of, ""))
		}
	}
	return strings.Join(lines[:results], "") + repeated.String() + strings.Join(lines[results:], "")
}

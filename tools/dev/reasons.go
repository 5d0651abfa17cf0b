package main

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// lastSaid is how many of a test's lines are repeated.
const lastSaid = 5

var (
	// speaks says whose the following lines are.
	speaks = regexp.MustCompile(`^=== (RUN|NAME|CONT) +(\S+)$`)
	// spoken is what a test logs, or fails with: its first line. Both look the same.
	spoken = regexp.MustCompile(`^ {4,}\w+\.go:\d+: `)
	// consoles begin the part that is longer than a screen (qemu/stories/story).
	consoles = regexp.MustCompile(`^ {4,}\w+\.go:\d+: the console of `)
	// result is what became of a test or, indented, of a part of the one above.
	result = regexp.MustCompile(`^ *--- ([A-Z]+): (\S+) `)
)

// reasons passes what "go test -v" prints on, and repeats right before a test's FAIL what it
// and those of its parts that failed said last before the consoles of its nodes: why it failed
// is else some hundred lines above.
type reasons struct {
	to      io.Writer
	part    []byte              // of a line
	current string              // test
	said    map[string][]string // at most lastSaid, by test
	hid     bool                // consoles followed them
	results []string            // lines that wait until all of a test's are there
	failed  []string            // tests among them
}

// Write implements io.Writer.
func (r *reasons) Write(p []byte) (int, error) {
	r.part = append(r.part, p...)
	for {
		i := bytes.IndexByte(r.part, '\n')
		if i < 0 {
			return len(p), nil
		}
		line := string(r.part[:i+1])
		r.part = r.part[i+1:]
		if err := r.line(line); err != nil {
			return len(p), err
		}
	}
}

func (r *reasons) line(line string) error {
	if m := result.FindStringSubmatch(line); m != nil {
		r.results = append(r.results, line)
		if m[1] == "FAIL" {
			r.failed = append(r.failed, m[2])
		}
		return nil
	}
	if err := r.tell(); err != nil {
		return err
	}
	if m := speaks.FindStringSubmatch(strings.TrimSuffix(line, "\n")); m != nil {
		r.current = m[2]
		if m[1] == "RUN" && !strings.Contains(m[2], "/") {
			r.said, r.hid = map[string][]string{}, false
		}
	}
	switch {
	case consoles.MatchString(line):
		r.hid = true
	case spoken.MatchString(line) && !r.hid && r.said != nil:
		said := append(r.said[r.current], line)
		r.said[r.current] = said[max(len(said)-lastSaid, 0):]
	}
	_, err := io.WriteString(r.to, line)
	return err
}

// tell writes the results that have waited, and before them the reasons.
func (r *reasons) tell() error {
	var text strings.Builder
	for _, name := range r.failed {
		if said := r.said[name]; r.hid && len(said) > 0 {
			fmt.Fprintf(&text, "What %s said before these consoles:\n%s", name, strings.Join(said, ""))
		}
	}
	text.WriteString(strings.Join(r.results, ""))
	r.results, r.failed = nil, nil
	_, err := io.WriteString(r.to, text.String())
	return err
}

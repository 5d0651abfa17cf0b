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
	// spoken is what a test logs, or fails with: its first line. Both look the same.
	spoken = regexp.MustCompile(`^ {4,}\w+\.go:\d+: `)
	// consoles begin the part that is longer than a screen (qemu/stories/story).
	consoles = regexp.MustCompile(`^ {4,}\w+\.go:\d+: the console of `)
)

// reasons passes what "go test -v" prints on, and repeats right before a test's FAIL what it
// said last before the consoles of its nodes: why it failed is else some hundred lines above.
type reasons struct {
	to   io.Writer
	part []byte   // of a line
	last []string // at most lastSaid
	hid  bool     // consoles followed them
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
	switch {
	case strings.HasPrefix(line, "=== RUN ") && !strings.Contains(line, "/"):
		r.last, r.hid = nil, false
	case consoles.MatchString(line):
		r.hid = true
	case spoken.MatchString(line) && !r.hid:
		r.last = append(r.last, line)
		r.last = r.last[max(len(r.last)-lastSaid, 0):]
	case strings.HasPrefix(line, "--- FAIL: ") && r.hid:
		if _, err := fmt.Fprintf(r.to, "What it said before these consoles:\n%s", strings.Join(r.last, "")); err != nil {
			return err
		}
	}
	_, err := io.WriteString(r.to, line)
	return err
}

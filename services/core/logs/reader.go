package logs

import (
	"context"
	"log/slog"
	"strings"
	"time"
)

// Reader reads a log from some line on, as fast as it likes. It has no buffer:
// the ring is the buffer of all readers, so that one which stalls costs nothing,
// holds up nobody, and learns how many lines went by. One goroutine uses it.
type Reader struct {
	ring *ring
	next uint64 // number of the line to read next
}

// Read begins with the last tail lines that are in memory; 0: all, negative:
// none. A log that nobody has written yet is waited for.
func (l *Logs) Read(id string, tail int) *Reader {
	r := l.ring(id)
	r.mu.Lock()
	defer r.mu.Unlock()
	there := len(r.items)
	switch {
	case tail < 0:
		there = 0
	case tail > 0:
		there = min(there, tail)
	}
	return &Reader{ring: r, next: r.added - uint64(there)}
}

// Next returns the lines that have come since the last call, and how many before
// them were lost. It doesn't wait; no lines means that there are none yet.
func (rd *Reader) Next() (lines []string, lost uint64) {
	r := rd.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	items, lost := r.since(rd.next)
	rd.next = r.added
	return append(lines, items...), lost
}

// Wait returns nil when Next has something, or ctx's error.
func (rd *Reader) Wait(ctx context.Context) error { return rd.ring.await(ctx, nil, rd.next) }

// Parse takes a line of Logger apart: level as syslog(3) counts, time (zero
// if it isn't such a line) and the text.
func Parse(line string) (level int, at time.Time, text string) {
	const gap = "  "
	if len(line) >= len(timeLayout)+len(gap) && line[len(timeLayout):][:len(gap)] == gap {
		if t, err := time.Parse(timeLayout, line[:len(timeLayout)]); err == nil {
			at, line = t, line[len(timeLayout)+len(gap):]
		}
	}
	for _, l := range []slog.Level{slog.LevelError, slog.LevelWarn} {
		if text, found := strings.CutPrefix(line, levelPrefix(l)); found {
			return priority(l), at, text
		}
	}
	return priority(slog.LevelInfo), at, line
}

package logs

import (
	"log/slog"
	"strings"
	"time"
)

// Read begins with the last tail lines that are in memory; 0: all, negative:
// none. A log that nobody has written yet is waited for.
func (l *Logs) Read(id string, tail int) *Reader[string] { return new(l.ring(id).read(tail)) }

// Parse takes a line of Logger apart: level as syslog(3) counts, time (zero
// if it isn't such a line) and the text.
func Parse(line string) (level int, at time.Time, text string) {
	const gap = "  "
	if len(line) >= len(timeLayout)+len(gap) && line[len(timeLayout):][:len(gap)] == gap {
		if t, err := time.Parse(timeLayout, line[:len(timeLayout)]); err == nil {
			at, line = t, line[len(timeLayout)+len(gap):]
		}
	}
	for _, l := range levels {
		if text, found := strings.CutPrefix(line, l.prefix); found && l.prefix != "" {
			return l.priority, at, text
		}
	}
	return priority(slog.LevelInfo), at, line
}

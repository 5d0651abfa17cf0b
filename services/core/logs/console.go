package logs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/time/rate"
)

const (
	consolePrefix = "[garboard] "

	// The kernel cuts a record of /dev/kmsg at 1024 bytes less its own prefix
	// (LOG_LINE_MAX in kernel/printk): stay below.
	maxConsoleLine = 900

	// A service in a loop must not drown what a person at the console looks for,
	// and a serial line at 115200 baud carries about 100 lines a second: after
	// a burst, this many.
	consoleBurst     = 200
	consolePerSecond = 20
)

// leveled is a console that keeps what it shows, by level.
type leveled interface{ WriteLevel(slog.Level, []byte) }

// console writes lines, one Write each, and no more than a reader can follow.
type console struct {
	w        io.Writer
	remember func(level slog.Level, text string) // unless the kernel does

	mu      sync.Mutex // guards all below and the order of writes
	limit   *rate.Limiter
	dropped int
	now     func() time.Time
}

func (c *console) write(level slog.Level, text string) {
	text = OneLine(text)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.limit.AllowN(c.now(), 1) {
		c.dropped++
		return
	}
	if c.dropped > 0 {
		missing := fmt.Sprintf("%d lines not shown here: too many at once, or too slow a reader (the services' logs have them)", c.dropped)
		if c.show(slog.LevelWarn, missing) == nil {
			c.remember(slog.LevelWarn, missing)
			c.dropped = 0
		}
	}
	c.remember(level, text)
	if c.dropped > 0 || c.show(level, text) != nil {
		c.dropped++
	}
}

// show splits text into records and hands each to the writer.
func (c *console) show(level slog.Level, text string) error {
	for text != "" {
		part := text
		if len(part) > maxConsoleLine {
			part = part[:runeBoundary(text, maxConsoleLine)]
		}
		text = text[len(part):]
		line := []byte(consolePrefix + part + "\n")
		if w, ok := c.w.(leveled); ok {
			w.WriteLevel(level, line)
		} else if _, err := c.w.Write(line); err != nil {
			return err
		}
	}
	return nil
}

// runeBoundary is the largest cut <= n that doesn't split a character.
func runeBoundary(s string, n int) int {
	for i := n; i > n-utf8.UTFMax; i-- {
		if utf8.RuneStart(s[i]) {
			return i
		}
	}
	return n
}

// KmsgDevice is the kernel's log as a file; see Documentation/ABI/testing/dev-kmsg.
const KmsgDevice = "/dev/kmsg"

// ConsoleLogLevel is what the kernel's console log level (printk(8)) has to be
// for our lines to show and the kernel's chatter not to: notice and above.
const ConsoleLogLevel = 6

// Kmsg writes to the kernel's log, from where the kernel shows it on every
// console with the time since boot in front, also when PID 1 dies right after.
type Kmsg struct{ w io.Writer }

// OpenKmsg opens the kernel's log at path for writing.
func OpenKmsg(path string) (*Kmsg, error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open kernel log: %w", err)
	}
	return &Kmsg{w: f}, nil
}

// Write is WriteLevel at info.
func (k *Kmsg) Write(line []byte) (int, error) {
	k.WriteLevel(slog.LevelInfo, line)
	return len(line), nil
}

// WriteLevel writes one record with the syslog priority for level: a record is
// what one write(2) brings.
func (k *Kmsg) WriteLevel(level slog.Level, line []byte) {
	// Facility 3 is "daemon" (syslog(3)); user records can't have the kernel's 0.
	const facilityDaemon = 3 << 3
	record := fmt.Appendf(nil, "<%d>%s", facilityDaemon|priority(level), bytes.TrimRight(line, "\n"))
	k.w.Write(append(record, '\n'))
}

// levelText is what lines and records have of a level, and of those above it up to the one before in levels.
type levelText struct {
	from     slog.Level
	priority int    // of syslog(3)
	prefix   string // of the text
}

var levels = []levelText{
	{slog.LevelError, 3, "error: "}, {slog.LevelWarn, 4, "warning: "}, {LevelNotice, 5, ""}, {slog.LevelInfo, 6, ""}, {math.MinInt, 7, ""},
}

func priority(level slog.Level) int       { return levels[rank(level)].priority }
func levelPrefix(level slog.Level) string { return levels[rank(level)].prefix }

func rank(level slog.Level) (i int) {
	for level < levels[i].from {
		i++
	}
	return i
}

// plainQueue is how many lines may wait for the reader of a plain console, of
// maxConsoleLine each: 1 MB at the very worst.
const plainQueue = 1024

// Plain is the console of a node in a container: the same lines as the kernel
// would show, with the time since start in front. Standard output is a file or a
// pipe there, so that its disk, or whoever reads it, may stall. Nobody who says
// something waits for that: one goroutine writes, as long as the program lives,
// and what doesn't fit into its queue is counted. See Logs.Flush.
func Plain(w io.Writer) io.Writer {
	return &plain{w: w, start: time.Now(), queue: make(chan func(), plainQueue)}
}

type plain struct {
	w     io.Writer
	start time.Time
	begin sync.Once   // of the goroutine
	queue chan func() // write a line, or say that all before are written
}

var errPlainFull = errors.New("the reader of the console is too slow")

func (p *plain) Write(line []byte) (int, error) {
	p.begin.Do(func() { go p.run() })
	text := fmt.Appendf(nil, "[%12.6f] %s", time.Since(p.start).Seconds(), line)
	select {
	case p.queue <- func() { _, _ = p.w.Write(text) }: // there is nobody to report an error to
		return len(line), nil
	default:
		return 0, errPlainFull
	}
}

func (p *plain) run() {
	for do := range p.queue {
		do()
	}
}

func (p *plain) flush(limit time.Duration) {
	p.begin.Do(func() { go p.run() })
	over := time.After(limit)
	shown := make(chan struct{})
	select {
	case p.queue <- func() { close(shown) }:
	case <-over:
		return
	}
	select {
	case <-shown:
	case <-over:
	}
}

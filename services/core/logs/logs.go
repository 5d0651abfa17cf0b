// Package logs stores the logs of the node's services.
//
// Each service, process and container has its own log: a bounded ring in
// memory from the first line on, and, once EPHEMERAL is mounted, a rotated file
// of bounded size beside it. What a person at the console has to know (warnings,
// and lines that ask for it) also goes there as `[garboard] <service>: message`.
//
// Writing a line never waits for a disk: files are written by one goroutine behind a
// bounded queue, and so is a console that isn't the kernel's. Lines that don't fit, or
// fail to be written, are counted, reported once on the console, and noted in the file
// when writing works again; the ring in memory has them in any case.
package logs

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// LevelNotice is for normal events that a person at the console should see:
	// above info, which is only in the service's own log.
	LevelNotice = slog.LevelInfo + 2

	// Bounds of one ring: a chatty service keeps its last minutes, and fifty of
	// them stay under the memory budget of PID 1.
	ringLines = 1000
	ringBytes = 128 << 10

	// A longer line is cut: nothing that a person reads is longer, and one
	// process without newlines must not eat the memory.
	maxLine = 16 << 10
)

// ConsoleID is the log of the console. It is there only where the kernel doesn't store
// that: on nodes in containers.
const ConsoleID = "console"

// consoleKey can't clash with a key that somebody prints: it has a blank.
const consoleKey = "to console"

// Console as an attribute of a line sends it to the console too, whatever its
// level: log.Info("listening", "address", a, logs.Console).
var Console = slog.Bool(consoleKey, true)

// Logs is all logs of a node.
type Logs struct {
	console *console
	now     func() time.Time

	mu   sync.Mutex // guards byID
	byID map[string]*ring

	disk disk
	feed Feed
}

// New returns logs that live in memory. console gets one Write per line; see
// Kmsg and Plain. It may be nil.
func New(consoleWriter io.Writer) *Logs {
	l := &Logs{
		console: &console{
			w: cmp.Or(consoleWriter, io.Discard), limit: rate.NewLimiter(consolePerSecond, consoleBurst), now: time.Now,
			remember: func(slog.Level, string) {},
		},
		now:  time.Now,
		byID: map[string]*ring{},
		feed: Feed{buffer: buffer[Record]{most: feedLines, mostBytes: feedBytes, size: Record.size}},
	}
	if _, kernel := consoleWriter.(leveled); !kernel {
		l.console.remember = func(level slog.Level, text string) {
			l.add(ConsoleID, l.now().UTC().Format(timeLayout)+"  "+levelPrefix(level)+text)
		}
	}
	l.disk.report = l.Printf
	l.disk.open = openFile
	return l
}

// Logger writes structured lines to the log of id, and to the console those of
// level warn and above, of LevelNotice, and those that carry Console.
func (l *Logs) Logger(id string) *slog.Logger {
	return slog.New(&handler{logs: l, id: id})
}

// Quiet is Logger without the console: for events that are shown there in another form.
func (l *Logs) Quiet(id string) *slog.Logger {
	return slog.New(&handler{logs: l, id: id, quiet: true})
}

// Printf writes one line to the console only.
func (l *Logs) Printf(format string, args ...any) {
	l.console.write(LevelNotice, fmt.Sprintf(format, args...))
}

// Screen writes to the console what is no line of a log.
func (l *Logs) Screen() io.Writer { return unlogged{l.console} }

type unlogged struct{ *console }

func (s unlogged) Write(text []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(text)
}

// Flush waits until the console has all lines that were written before, at most for
// limit. The kernel has them at once; a plain console may be behind, and lines that it
// hasn't written when the program ends are lost.
func (l *Logs) Flush(limit time.Duration) {
	if p, ok := l.console.w.(*plain); ok {
		p.flush(limit)
	}
}

// Tail returns the last lines of a log, oldest first, from memory; 0: all that are
// there. An unknown id has none.
func (l *Logs) Tail(id string, lines int) []string {
	l.mu.Lock()
	r := l.byID[id]
	l.mu.Unlock()
	if r == nil {
		return nil
	}
	reader := r.read(lines)
	last, _ := reader.Next(math.MaxInt)
	return last
}

// IDs lists the logs that have been asked for, sorted.
func (l *Logs) IDs() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.byID))
}

// Feed is the lines of all logs, for those who send them elsewhere.
func (l *Logs) Feed() *Feed { return &l.feed }

// add is the way of every line into its ring, the feed and, if there is one, its file.
func (l *Logs) add(id, line string) {
	if len(line) > maxLine {
		line = line[:maxLine]
	}
	level, _, text := Parse(line)
	l.put(line, Record{Time: l.now(), Facility: FacilityService, Service: id, Level: level, Message: text})
}

// put adds a line, and the same as a record of the feed.
func (l *Logs) put(line string, rec Record) {
	r := l.ring(rec.Service)
	// The ring's lock is held over both, so that ring and file have one order,
	// and so that Persist sees each line either in the ring or in the queue.
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(line)
	l.disk.enqueue(rec.Service, line)
	l.feed.Add(rec)
}

// ring keeps the last lines of one log.
type ring = buffer[string]

func (l *Logs) ring(id string) *ring {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.byID[id]
	if r == nil {
		r = &ring{most: ringLines, mostBytes: ringBytes, size: func(line string) int { return len(line) }}
		l.byID[id] = r
	}
	return r
}

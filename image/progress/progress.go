// Package progress tells people what a long run is doing: which step of how many, and for how long already.
//
// It is quiet about what is quick. A step shows up only once it has lasted for two seconds, so that a run that finds
// all in a cache says nothing but one summary line. On a terminal there is one live line; anywhere else (a log, CI)
// each long step gets a line when it shows up, one every quarter of a minute, and one when it ends.
package progress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/image/cache"
	"golang.org/x/term"
)

const (
	// showAfter is how long a step lasts before it is worth a line.
	showAfter = 2 * time.Second
	// lineEvery is the pace of lines where there is no terminal: often enough to see life, seldom enough for a log.
	lineEvery = 15 * time.Second
	// redraw is the pace of the live line: its smallest unit is the second.
	redraw = time.Second
	// narrow is the width assumed for a terminal that doesn't tell its own.
	narrow = 80
)

// Reporter reports the steps of one run. A nil *Reporter reports nothing. It may be used by several goroutines.
type Reporter struct {
	w     io.Writer
	width func() int // of the terminal; nil: w is no terminal
	now   func() time.Time

	mu      sync.Mutex // guards all that follows
	planned []string
	cached  map[string]bool
	running []*step // in the order they started
	ticking bool
	live    bool // the live line is on the screen
}

// step is a step under way.
type step struct {
	name  string
	start time.Time
	shown time.Time // when its last line was printed; zero: never
}

// New reports to w.
func New(w io.Writer) *Reporter {
	r := &Reporter{w: w, now: time.Now, cached: map[string]bool{}}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		r.width = func() int {
			width, _, err := term.GetSize(int(f.Fd()))
			if err != nil || width <= 0 {
				return narrow
			}
			return width
		}
	}
	return r
}

// locked does something with the mutex held, unless there is no Reporter.
func (r *Reporter) locked(do func()) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	do()
}

// Plan announces steps, so that each knows which of how many it is. Steps that were announced before keep their place:
// whoever runs a part may announce it once more.
func (r *Reporter) Plan(steps ...string) {
	r.locked(func() {
		for _, name := range steps {
			if !slices.Contains(r.planned, name) {
				r.planned = append(r.planned, name)
			}
		}
	})
}

// Cached says that a step had nothing to do, for Summary to count.
func (r *Reporter) Cached(name string) {
	r.locked(func() { r.cached[name] = true })
}

// Summary prints one line that says how many of the steps came from the cache: "9 of 9 components cached". It prints
// nothing when none did, or when there is only one step: whoever asked for one thing sees that it is there.
func (r *Reporter) Summary(what string, steps ...string) {
	r.locked(func() {
		hits := 0
		for _, name := range steps {
			if r.cached[name] {
				hits++
			}
		}
		if hits > 0 && len(steps) > 1 {
			r.line("%d of %d %s cached", hits, len(steps), what)
		}
	})
}

// Note prints a line that isn't about a step.
func (r *Reporter) Note(text string) {
	r.locked(func() { r.line("%s", text) })
}

// Build is store.Build as a step of this name.
func (r *Reporter) Build(ctx context.Context, store *cache.Store, name string, inputs []string, build func(ctx context.Context, dir string) error) (string, error) {
	hit := true
	dir, err := store.Build(ctx, name, inputs, func(ctx context.Context, dir string) error {
		hit = false
		done := r.Step(name)
		err := build(ctx, dir)
		done(err)
		return err
	})
	if err == nil && hit {
		r.Cached(name)
	}
	return dir, err
}

// Step starts a step; the returned function ends it and must be called once. An error is reported whatever the step's
// length.
func (r *Reporter) Step(name string) func(error) {
	if r == nil {
		return func(error) {}
	}
	r.Plan(name)
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &step{name: name, start: r.now()}
	r.running = append(r.running, s)
	if !r.ticking {
		r.ticking = true
		go r.tickWhileRunning()
	}
	var once sync.Once
	return func(err error) { once.Do(func() { r.end(s, err) }) }
}

func (r *Reporter) end(s *step, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = slices.DeleteFunc(r.running, func(other *step) bool { return other == s })
	took := r.now().Sub(s.start)
	switch {
	case errors.Is(err, context.Canceled):
		r.line("%s %s interrupted after %s", r.position(s.name), s.name, round(took))
	case err != nil:
		r.line("%s %s failed after %s: %v", r.position(s.name), s.name, round(took), err)
	case took >= showAfter:
		r.line("%s %s built in %s", r.position(s.name), s.name, round(took))
	}
	if len(r.running) > 0 {
		r.draw()
	}
}

// tickWhileRunning is the only goroutine of a Reporter, and lives only while a step does.
func (r *Reporter) tickWhileRunning() {
	ticker := time.NewTicker(redraw)
	defer ticker.Stop()
	for range ticker.C {
		if !r.tick() {
			return
		}
	}
}

// tick shows what time has changed. It reports false when nothing is under way any more.
func (r *Reporter) tick() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.running) == 0 {
		r.ticking = false
		return false
	}
	if r.width != nil {
		r.draw()
		return true
	}
	for _, s := range r.running {
		elapsed := r.now().Sub(s.start)
		switch {
		case elapsed < showAfter:
		case s.shown.IsZero():
			r.line("%s building %s …", r.position(s.name), s.name)
			s.shown = r.now()
		case r.now().Sub(s.shown) >= lineEvery:
			r.line("%s", r.describe(s))
			s.shown = r.now()
		}
	}
	return true
}

// draw puts the live line on the terminal, or renews it.
func (r *Reporter) draw() {
	if r.width == nil {
		return
	}
	var parts []string
	for _, s := range r.running {
		if r.now().Sub(s.start) >= showAfter {
			parts = append(parts, r.describe(s))
		}
	}
	if len(parts) == 0 {
		return
	}
	text := []rune(strings.Join(parts, "   "))
	if width := r.width() - 1; len(text) > width { // a full line would wrap, and \r would then miss its start
		text = append(text[:max(width-1, 0)], '…')
	}
	fmt.Fprintf(r.w, "\r\x1b[K%s", string(text))
	r.live = true
}

// line prints a line that stays, in the place of the live one.
func (r *Reporter) line(format string, args ...any) {
	if r.live {
		fmt.Fprint(r.w, "\r\x1b[K")
		r.live = false
	}
	fmt.Fprintf(r.w, format+"\n", args...)
}

func (r *Reporter) position(name string) string {
	return fmt.Sprintf("[%d/%d]", slices.Index(r.planned, name)+1, len(r.planned))
}

// describe is the state of a running step: "[3/9] building etcd … 12s".
func (r *Reporter) describe(s *step) string {
	return fmt.Sprintf("%s building %s … %s", r.position(s.name), s.name, round(r.now().Sub(s.start)))
}

// round is a duration as people say it: whole seconds, without a trailing "0s" after minutes.
func round(d time.Duration) string {
	if d = d.Round(time.Second); d >= time.Minute {
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

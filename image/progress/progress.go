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

	clearLine = "\r\x1b[K"
)

// Reporter reports the steps of one run, which come one after the other.
type Reporter struct {
	w       io.Writer
	width   func() int // of the terminal; nil: w is no terminal
	planned []string
	cached  map[string]bool
}

// New reports to w.
func New(w io.Writer) *Reporter {
	r := &Reporter{w: w, cached: map[string]bool{}}
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

// Plan announces steps, so that each knows which of how many it is. Steps that were announced before keep their place:
// whoever runs a part may announce it once more.
func (r *Reporter) Plan(steps ...string) {
	for _, name := range steps {
		if !slices.Contains(r.planned, name) {
			r.planned = append(r.planned, name)
		}
	}
}

// Summary prints one line that says how many of the steps came from the cache: "9 of 9 components cached". It prints
// nothing when none did, or when there is only one step: whoever asked for one thing sees that it is there.
func (r *Reporter) Summary(what string, steps ...string) {
	hits := 0
	for _, name := range steps {
		if r.cached[name] {
			hits++
		}
	}
	if hits > 0 && len(steps) > 1 {
		r.Note(fmt.Sprintf("%d of %d %s cached", hits, len(steps), what))
	}
}

// Note prints a line that isn't about a step. On a terminal, it takes the place of the live one.
func (r *Reporter) Note(text string) {
	if r.width != nil {
		text = clearLine + text
	}
	fmt.Fprintln(r.w, text)
}

// Build is store.Build as a step of this name.
func (r *Reporter) Build(ctx context.Context, store *cache.Store, name string, inputs []string, build func(ctx context.Context, dir string) error) (string, error) {
	r.cached[name] = true
	return store.Build(ctx, name, inputs, func(ctx context.Context, dir string) error {
		r.cached[name] = false
		return r.step(name, func() error { return build(ctx, dir) })
	})
}

// step reports what it does. An error is reported whatever the step's length.
func (r *Reporter) step(name string, do func() error) error {
	r.Plan(name)
	place := fmt.Sprintf("[%d/%d]", slices.Index(r.planned, name)+1, len(r.planned))
	result, start := make(chan error, 1), time.Now()
	go func() { result <- do() }()
	ticker := time.NewTicker(redraw)
	defer ticker.Stop()
	for {
		select {
		case err := <-result:
			r.ended(place+" "+name, time.Since(start).Round(time.Second), err)
			return err
		case <-ticker.C:
			r.lasts(place+" building "+name+" …", time.Since(start).Round(time.Second))
		}
	}
}

func (r *Reporter) ended(step string, took time.Duration, err error) {
	switch {
	case errors.Is(err, context.Canceled):
		r.Note(fmt.Sprintf("%s interrupted after %s", step, took))
	case err != nil:
		r.Note(fmt.Sprintf("%s failed after %s: %v", step, took, err))
	case took >= showAfter:
		r.Note(fmt.Sprintf("%s built in %s", step, took))
	}
}

func (r *Reporter) lasts(step string, took time.Duration) {
	switch {
	case took < showAfter:
	case r.width != nil:
		text := []rune(fmt.Sprint(step, " ", took))
		if width := r.width() - 1; len(text) > width { // a full line would wrap, and \r would then miss its start
			text = append(text[:max(width-1, 0)], '…')
		}
		fmt.Fprint(r.w, clearLine+string(text))
	case took == showAfter:
		r.Note(step)
	case (took-showAfter)%lineEvery == 0:
		r.Note(fmt.Sprint(step, " ", took))
	}
}

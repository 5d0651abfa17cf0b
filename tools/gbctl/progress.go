package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// interactive reports whether an input or an output is a terminal.
func interactive(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// waiting prints, after progressDelay, the nodes that haven't answered yet.
type waiting struct {
	mu    sync.Mutex
	nodes []string // guarded by mu
	timer *time.Timer
}

func (a *app) waitFor(nodes []string) *waiting {
	w := &waiting{nodes: slices.Clone(nodes)}
	if interactive(a.err) {
		w.timer = time.AfterFunc(progressDelay, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.nodes) > 0 {
				fmt.Fprintf(a.notes(), "waiting for %s\n", strings.Join(w.nodes, ", "))
			}
		})
	}
	return w
}

func (w *waiting) done(node string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes = slices.DeleteFunc(w.nodes, func(n string) bool { return n == node })
}

// end stops the output.
func (w *waiting) end() {
	if w.timer != nil {
		w.timer.Stop()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes = nil
}

const (
	// A bar is drawn again after redrawTime. Elsewhere, a line comes after lineTime: short work has none.
	redrawTime, lineTime = 100 * time.Millisecond, 10 * time.Second
	barSteps             = 30
)

// progressBar shows how far a long work is: on a terminal in place, elsewhere by a line now and then.
type progressBar struct {
	w     io.Writer
	place bool
	last  time.Time
}

func (a *app) progressBar() *progressBar {
	return &progressBar{w: a.notes(), place: interactive(a.err), last: time.Now()}
}

// at shows what is done, of an amount that is known (or 0).
func (b *progressBar) at(what string, done, total uint64) {
	if time.Since(b.last) < map[bool]time.Duration{true: redrawTime, false: lineTime}[b.place] {
		return
	}
	b.last = time.Now()
	part := ""
	if total > 0 {
		full := int(barSteps * min(done, total) / total)
		part = "[" + strings.Repeat("#", full) + strings.Repeat(".", barSteps-full) + "] "
	}
	fmt.Fprintf(b.w, map[bool]string{true: "\r\x1b[K%s%s", false: "%[2]s\n"}[b.place], part, what)
}

// end removes the bar.
func (b *progressBar) end() {
	if b.place {
		fmt.Fprint(b.w, "\r\x1b[K")
	}
}

// retryLog prints the error before a new try. It doesn't repeat the same error.
type retryLog struct{ last string }

func (r *retryLog) print(w io.Writer, err error) {
	if text := err.Error(); text != r.last {
		r.last = text
		fmt.Fprintf(w, "%s retrying error: %s\n", time.Now().Format("2006/01/02 15:04:05"), text)
	}
}

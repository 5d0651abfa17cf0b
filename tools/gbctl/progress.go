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

// retryLog prints the error before a new try (S-011). It doesn't repeat the same error.
type retryLog struct{ last string }

func (r *retryLog) print(w io.Writer, err error) {
	if text := err.Error(); text != r.last {
		r.last = text
		fmt.Fprintf(w, "%s retrying error: %s\n", time.Now().Format("2006/01/02 15:04:05"), text)
	}
}

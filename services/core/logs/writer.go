package logs

import (
	"bytes"
	"io"
	"sync"
)

// Writer takes the raw output of a process or container, line by line, into the
// log of id only. A last line without newline is taken at Close. Writes never
// fail.
func (l *Logs) Writer(id string) io.WriteCloser { return &lineWriter{logs: l, id: id} }

type lineWriter struct {
	logs *Logs
	id   string

	mu      sync.Mutex // guards partial
	partial []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for rest := p; len(rest) > 0; {
		line, after, whole := bytes.Cut(rest, []byte{'\n'})
		w.partial = append(w.partial, line...)
		// Without newline in sight, hand over what there is: see maxLine.
		if whole || len(w.partial) >= maxLine {
			w.flush()
		}
		rest = after
	}
	return len(p), nil
}

func (w *lineWriter) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.partial) > 0 {
		w.flush()
	}
	return nil
}

func (w *lineWriter) flush() {
	w.logs.add(w.id, string(bytes.TrimSuffix(w.partial, []byte{'\r'})))
	w.partial = w.partial[:0]
}

// Package statefile passes state from PID 1 to a program in a sandbox: a document, in a
// directory that the program reads when it changed; it checks every second. So
// certificates, authorities and tokens are replaced without a restart.
//
//	Publisher, in PID 1 ──▶ state.json ──▶ Watcher, in the sandbox
//
// The document is replaced in one step: a reader never uses half of a change.
package statefile

import (
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/garboard-os/garboard/boot"
)

// StateName is the file with the document.
const StateName = "state.json"

// MaxFile bounds what is read of it: PID 1 writes it, yet hundreds of authorities fit.
const MaxFile = 1 << 20

// Write puts a state into dir, for one user alone.
func Write(dir string, uid int, state any) error {
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// Lchown: where a link is, nothing is given away by it.
	if err := os.Lchown(dir, uid, uid); err != nil {
		return err
	}
	return boot.WriteFileFor(uid, filepath.Join(dir, StateName), text, 0o600)
}

// Watcher is the program's side: it has what the program makes of the facts that PID 1 has
// written. But for State, it is for one goroutine at a time.
type Watcher[F, S any] struct {
	Dir string
	Use func(F) (*S, error)

	state    atomic.Pointer[S]
	seen     fs.FileInfo // of the file that was taken
	reported string      // the last error that was logged
}

// State is the state in use. It never changes: a new one replaces it.
func (w *Watcher[F, S]) State() *S { return w.state.Load() }

// Next takes what PID 1 has written, if it has changed since. After an error, the former state
// stays in use, and the next call tries again.
func (w *Watcher[F, S]) Next() error {
	f, err := os.Open(filepath.Join(w.Dir, StateName))
	if err != nil {
		return err
	}
	defer f.Close()
	at, err := f.Stat()
	if err != nil {
		return err
	}
	if w.seen != nil && os.SameFile(at, w.seen) && at.Size() == w.seen.Size() && at.ModTime().Equal(w.seen.ModTime()) {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	if err == nil && len(text) > MaxFile {
		err = fmt.Errorf("it has more than %d bytes", MaxFile)
	}
	var facts F
	if err == nil {
		err = json.Unmarshal(text, &facts)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", StateName, err)
	}
	next, err := w.Use(facts)
	if err != nil {
		return err
	}
	w.state.Store(next)
	w.seen = at
	return nil
}

// Poll is Next for a call every second: it logs an error once.
func (w *Watcher[F, S]) Poll(log *slog.Logger) {
	why := ""
	if err := w.Next(); err != nil {
		why = err.Error()
	}
	if why != "" && why != w.reported {
		log.Warn("the state that PID 1 has written can't be used; the former one stays in use", slog.String("err", why))
	}
	w.reported = why
}

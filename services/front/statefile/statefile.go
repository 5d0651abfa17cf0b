// Package statefile passes state from PID 1 to a program in a sandbox: facts and
// files, in a directory that the program reads when it changed; it checks every
// second. So certificates, authorities and tokens are replaced without a restart.
//
//	Publisher, in PID 1 ──▶ ca.crt, server.key, …, then state.json ──▶ Watcher, in the sandbox
//
// state.json is written last and holds the digest of the others: so a reader never
// uses half of a change.
package statefile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/garboard-os/garboard/boot"
)

// StateName is the file with the facts.
const StateName = "state.json"

// MaxFile bounds what is read of each file: PID 1 writes them, yet a hundred
// authorities fit.
const MaxFile = 256 << 10

// State is all that a program gets: facts, which are JSON, and files.
type State[F any] struct {
	Facts F
	Files map[string][]byte // by name; empty ones are written, too
}

// stateFile is state.json.
type stateFile[F any] struct {
	Facts  F      `json:"facts"`
	Digest string `json:"digest"`
}

func (s State[F]) digest() string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		fmt.Fprintf(h, "%s %d ", name, len(s.Files[name]))
		h.Write(s.Files[name])
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (s State[F]) state() ([]byte, error) {
	return json.Marshal(stateFile[F]{Facts: s.Facts, Digest: s.digest()})
}

// Equal reports whether both hold the same.
func (s State[F]) Equal(other State[F]) bool {
	one, err1 := s.state()
	two, err2 := other.state()
	return err1 == nil && err2 == nil && bytes.Equal(one, two)
}

// Write puts s into dir, for one user alone.
func (s State[F]) Write(dir string, uid int) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// Lchown: where a link is, nothing is given away by it.
	if err := os.Lchown(dir, uid, uid); err != nil {
		return err
	}
	put := func(name string, data []byte) error {
		return boot.WriteFileFor(uid, filepath.Join(dir, name), data, 0o600)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		if err := put(name, s.Files[name]); err != nil {
			return err
		}
	}
	text, err := s.state()
	if err != nil {
		return err
	}
	return put(StateName, text)
}

// Read reads what Write wrote; names are the files that belong to it.
func Read[F any](dir string, names ...string) (s State[F], err error) {
	text, err := readFile(filepath.Join(dir, StateName))
	if err != nil {
		return s, err
	}
	var w stateFile[F]
	if err := json.Unmarshal(text, &w); err != nil {
		return s, fmt.Errorf("read %s: %w", StateName, err)
	}
	s = State[F]{Facts: w.Facts, Files: make(map[string][]byte, len(names))}
	for _, name := range names {
		if s.Files[name], err = readFile(filepath.Join(dir, name)); err != nil {
			return s, err
		}
	}
	if s.digest() != w.Digest {
		return s, fmt.Errorf("read %s: its files are not those that it was written for", StateName)
	}
	return s, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxFile {
		return nil, fmt.Errorf("read %s: more than %d bytes", path, MaxFile)
	}
	return data, nil
}

// Watcher detects that the state on disk has changed. It is for one goroutine at a
// time.
type Watcher struct {
	Dir      string
	seen     fs.FileInfo // of the state that was taken
	reported string      // the last error that was logged
}

// Next calls take if state.json has changed since it was last taken. If take returns
// an error, the next call tries again.
func (w *Watcher) Next(take func() error) error {
	at, err := os.Stat(filepath.Join(w.Dir, StateName))
	if err != nil {
		return err
	}
	if w.seen != nil && os.SameFile(at, w.seen) && at.Size() == w.seen.Size() && at.ModTime().Equal(w.seen.ModTime()) {
		return nil
	}
	if err := take(); err != nil {
		return err
	}
	w.seen = at
	return nil
}

// Poll is Next for a call every second: it logs an error once.
func (w *Watcher) Poll(log *slog.Logger, take func() error) {
	why := ""
	if err := w.Next(take); err != nil {
		why = err.Error()
	}
	if why != "" && why != w.reported {
		log.Warn("the state that PID 1 has written can't be used; the former one stays in use", slog.String("err", why))
	}
	w.reported = why
}

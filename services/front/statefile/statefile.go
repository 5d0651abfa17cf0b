// Package briefing is what PID 1 tells a program in a sandbox: facts and files, in
// a directory that the program looks at every second. So certificates are renewed,
// authorities and tokens replaced, without a restart.
//
//	Publisher, in PID 1 ──▶ ca.crt, server.key, …, then state.json ──▶ Watcher, in the sandbox
//
// state.json is written last and names the digest of the others: so half a change is
// never taken for a whole one.
package statefile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/boot"
)

// StateName is the file with the facts.
const StateName = "state.json"

// MaxFile bounds what is read of each file: PID 1 writes them, yet a hundred
// authorities fit.
const MaxFile = 256 << 10

// State is all that a program is told: facts, which are JSON, and files.
type State[F any] struct {
	Facts F
	Files map[string][]byte // by name; empty ones are written, too
}

// stateFile is state.json.
type stateFile[F any] struct {
	Facts  F      `json:"facts"`
	Digest string `json:"digest"`
}

func (b State[F]) digest() string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(b.Files)) {
		fmt.Fprintf(h, "%s %d ", name, len(b.Files[name]))
		h.Write(b.Files[name])
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (b State[F]) state() ([]byte, error) {
	return json.Marshal(stateFile[F]{Facts: b.Facts, Digest: b.digest()})
}

// Equal tells whether both say the same.
func (b State[F]) Equal(other State[F]) bool {
	one, err1 := b.state()
	two, err2 := other.state()
	return err1 == nil && err2 == nil && bytes.Equal(one, two)
}

// Write puts b into dir, for one user alone.
func (b State[F]) Write(dir string, uid int) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// Lchown, here and below: the program owns the directory, and where it had put a
	// link, another file would be given to it.
	if err := os.Lchown(dir, uid, uid); err != nil {
		return err
	}
	put := func(name string, data []byte) error {
		path := filepath.Join(dir, name)
		if err := boot.WriteFile(path, data, 0o600); err != nil {
			return err
		}
		// In between the program can't read it, and tries again in a second.
		return os.Lchown(path, uid, uid)
	}
	for _, name := range slices.Sorted(maps.Keys(b.Files)) {
		if err := put(name, b.Files[name]); err != nil {
			return err
		}
	}
	text, err := b.state()
	if err != nil {
		return err
	}
	return put(StateName, text)
}

// Read is the other side of Write, for the files that are named.
func Read[F any](dir string, names ...string) (b State[F], err error) {
	text, err := readFile(filepath.Join(dir, StateName))
	if err != nil {
		return b, err
	}
	var f stateFile[F]
	if err := json.Unmarshal(text, &f); err != nil {
		return b, fmt.Errorf("read %s: %w", StateName, err)
	}
	b = State[F]{Facts: f.Facts, Files: make(map[string][]byte, len(names))}
	for _, name := range names {
		if b.Files[name], err = readFile(filepath.Join(dir, name)); err != nil {
			return b, err
		}
	}
	if b.digest() != f.Digest {
		return b, fmt.Errorf("read %s: its files are not those that it was written for", StateName)
	}
	return b, nil
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

// Watcher tells a new briefing from the one that is known. It is for one goroutine
// at a time.
type Watcher struct {
	Dir  string
	seen stamp  // of the one that was taken
	said string // what was wrong
}

// Next calls take if there is another state.json than the one that was last taken.
// One that take doesn't want is offered again.
func (f *Watcher) Next(take func() error) error {
	at, err := stampOf(filepath.Join(f.Dir, StateName))
	if err != nil || at == f.seen {
		return err
	}
	if err := take(); err != nil {
		return err
	}
	f.seen = at
	return nil
}

// Poll is Next, every second: it says once what is wrong.
func (f *Watcher) Poll(log *slog.Logger, take func() error) {
	why := ""
	if err := f.Next(take); err != nil {
		why = err.Error()
	}
	if why != "" && why != f.said {
		log.Warn("what PID 1 has written can't be used; going on with what was before", slog.String("err", why))
	}
	f.said = why
}

// stamp tells one state.json from the next.
type stamp struct {
	inode    uint64
	size     int64
	modified time.Time
}

func stampOf(path string) (stamp, error) {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	s := stamp{size: info.Size(), modified: info.ModTime()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = sys.Ino
	}
	return s, nil
}

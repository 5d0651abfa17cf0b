package statefile

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type facts struct {
	Mode string `json:"mode"`
	Cert []byte `json:"cert"`
}

func write(t *testing.T, f facts, dir string) {
	t.Helper()
	if err := Write(dir, os.Getuid(), f); err != nil {
		t.Fatal(err)
	}
}

// errUnusable is what the program says of facts that it can't use.
var errUnusable = errors.New("it can't be used")

// watcher notes what it takes.
func watcher(dir string, taken *[]string) *Watcher[facts, facts] {
	return &Watcher[facts, facts]{Dir: dir, Use: func(f facts) (*facts, error) {
		if f.Mode == "" {
			return nil, errUnusable
		}
		*taken = append(*taken, f.Mode+string(f.Cert))
		return &f, nil
	}}
}

// What was written is read, by one user alone.
func TestWriteAndRead(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "program")
	write(t, facts{"x", []byte("12")}, dir)
	w := watcher(dir, new([]string))
	if err := w.Next(); err != nil {
		t.Fatal(err)
	}
	if got := w.State(); got.Mode != "x" || string(got.Cert) != "12" {
		t.Errorf("%+v", got)
	}
	for _, name := range []string{"", StateName} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
}

func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, facts{"x", bytes.Repeat([]byte("a"), MaxFile)}, dir)
	if err := watcher(dir, new([]string)).Next(); err == nil || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Error(err)
	}
}

// A watcher takes each state once, and tries again one that it couldn't use: the former one stays. It logs an error
// once.
func TestWatcher(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var taken []string
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	first := watcher(dir, &taken)
	if err := first.Next(); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	write(t, facts{Mode: "one"}, dir)
	for range 2 {
		if err := first.Next(); err != nil {
			t.Error(err)
		}
	}
	whole, err := os.ReadFile(filepath.Join(dir, StateName))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{whole[:len(whole)-1], []byte("{}")} { // cut off, and of no use
		if err := os.WriteFile(filepath.Join(dir, StateName), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		logged.Reset()
		for range 2 {
			first.Poll(log)
		}
		if text := logged.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "the former one stays in use") || first.State().Mode != "one" {
			t.Errorf("%s, %+v", text, first.State())
		}
	}
	write(t, facts{Mode: "two", Cert: []byte("2")}, dir)
	later := watcher(dir, &taken)
	for _, w := range []*Watcher[facts, facts]{first, later} {
		w.Poll(log)
	}
	if got := strings.Join(taken, " "); got != "one two2 two2" {
		t.Error(got)
	}
}

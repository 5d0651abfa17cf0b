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
}

func stateOf(mode, a, b string) State[facts] {
	return State[facts]{Facts: facts{mode}, Files: map[string][]byte{"a": []byte(a), "b": []byte(b)}}
}

func write(t *testing.T, b State[facts], dir string) {
	t.Helper()
	if err := b.Write(dir, os.Getuid()); err != nil {
		t.Fatal(err)
	}
}

// What was written is read, by one user alone; a content that moved from one file to
// the next is another one.
func TestWriteAndRead(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "program")
	want := stateOf("x", "12", "")
	write(t, want, dir)
	got, err := Read[facts](dir, "a", "b")
	if err != nil || !got.Equal(want) || !want.Equal(got) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, other := range []State[facts]{stateOf("y", "12", ""), stateOf("x", "1", "2"), stateOf("x", "", "12"), {Facts: facts{"x"}}} {
		if other.Equal(want) {
			t.Errorf("%+v is the same", other)
		}
	}
	for _, name := range []string{"", "a", "b", StateName} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
	if _, err := Read[facts](dir, "a"); err == nil {
		t.Error("a file was left out")
	}
	if _, err := Read[facts](dir, "a", "b", "c"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, stateOf("x", strings.Repeat("a", MaxFile+1), ""), dir)
	if _, err := Read[facts](dir, "a", "b"); err == nil || !strings.Contains(err.Error(), "more than 262144 bytes") {
		t.Error(err)
	}
}

// A watcher takes each state once, and tries again one that it couldn't use; half of
// one is never used. It logs an error once.
func TestWatcher(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var taken []string
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	first := Watcher{Dir: dir}
	take := func() error {
		b, err := Read[facts](dir, "a", "b")
		if err == nil {
			taken = append(taken, b.Facts.Mode)
		}
		return err
	}
	if err := first.Next(take); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	write(t, stateOf("one", "1", "1"), dir)
	for range 2 {
		if err := first.Next(take); err != nil {
			t.Error(err)
		}
	}
	// Half of a change: a program that starts now must not take it.
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("2"), 0o600); err != nil {
		t.Fatal(err)
	}
	later := Watcher{Dir: dir}
	for range 2 {
		later.Poll(log, take)
	}
	if text := logged.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "not those that it was written for") {
		t.Error(text)
	}
	write(t, stateOf("two", "2", "1"), dir)
	for _, w := range []*Watcher{&first, &later} {
		w.Poll(log, take)
	}
	if got := strings.Join(taken, " "); got != "one two two" {
		t.Error(got)
	}
}

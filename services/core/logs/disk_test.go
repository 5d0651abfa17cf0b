package logs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPersistKeepsEarlierLinesAndEarlierBoots(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	for boot := range 6 {
		l := New(nil)
		w := l.Writer("etcd")
		fmt.Fprintf(w, "boot %d early\n", boot)
		if err := l.Persist(dir, uint64(boot)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(w, "boot %d late\n", boot)
		l.Release()
		fmt.Fprintf(w, "in memory only\n")
		l.Release() // twice is harmless
	}
	for i, name := range []string{"etcd.log", "etcd.log.1", "etcd.log.2", "etcd.log.3"} {
		want := fmt.Sprintf("-- boot %d --\nboot %d early\nboot %d late\n", 5-i, 5-i, 5-i)
		if got := read(t, filepath.Join(dir, name)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != keepOld+1 {
		t.Errorf("%d files, want %d", len(entries), keepOld+1)
	}
}

// Duty 13: earlier lines can be read, oldest first, also those of a log that has no line in this
// boot.
func TestPreviousLines(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	previous := func(l *Logs, id string, tail int) (lines []string) {
		for line, err := range l.Previous(id, tail) {
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, line)
		}
		return lines
	}
	var last *Logs
	for boot := range 6 {
		last = New(nil)
		if err := last.Persist(dir, uint64(boot)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(last.Writer("etcd"), "boot %d one\nboot %d two\n", boot, boot)
		if boot < 5 {
			fmt.Fprintf(last.Writer("silent"), "boot %d\n", boot)
			last.Release()
		}
	}
	for _, err := range New(nil).Previous("etcd", 0) {
		if !errors.Is(err, ErrNotPersisted) {
			t.Errorf("without files: %v", err)
		}
	}
	defer last.Release()
	eventually.That(t, 10*time.Second, "the line of this boot is on the disk", func() error {
		if text := read(t, filepath.Join(dir, "etcd.log")); text != "-- boot 5 --\nboot 5 one\nboot 5 two\n" {
			return fmt.Errorf("it has %q", text)
		}
		return nil
	})
	all := []string{"boot 2 one", "boot 2 two", "boot 3 one", "boot 3 two", "boot 4 one", "boot 4 two"}
	for tail, want := range map[int][]string{0: all, -1: nil, 3: all[3:], 6: all, 100: all} {
		if got := previous(last, "etcd", tail); !slices.Equal(got, want) {
			t.Errorf("the last %d: %q, want %q", tail, got, want)
		}
	}
	if got, want := previous(last, "silent", 0), []string{"boot 1", "boot 2", "boot 3", "boot 4"}; !slices.Equal(got, want) {
		t.Errorf("of a service that is silent: %q, want %q", got, want)
	}
	if got := previous(last, "never", 0); got != nil {
		t.Errorf("of a log without files: %q", got)
	}
	for boot, want := range map[int64][]string{-1: all[4:], -3: all[:2], 2: all[:2], 5: {"boot 5 one", "boot 5 two"}} {
		var got []string
		for line, err := range last.OfBoot("etcd", boot, 0) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, line)
		}
		if !slices.Equal(got, want) {
			t.Errorf("of boot %d: %q, want %q", boot, got, want)
		}
	}
	for _, err := range last.OfBoot("etcd", -4, 0) {
		if !errors.Is(err, ErrNoBoot) || !strings.Contains(err.Error(), "of boot 1; the files have those of: boot 2, boot 3, boot 4, boot 5") {
			t.Errorf("of a boot without files: %v", err)
		}
	}
	for line := range last.Previous("etcd", 0) { // a reader may leave
		if line != all[0] {
			t.Errorf("the first is %q", line)
		}
		break
	}
}

func TestRotationBoundsSize(t *testing.T) {
	dir := t.TempDir()
	l := New(nil)
	if err := l.Persist(dir, 1); err != nil {
		t.Fatal(err)
	}
	w := l.Writer("big/one")
	line := strings.Repeat("y", 8000)
	for range 2 * (keepOld + 1) * maxFile / len(line) {
		fmt.Fprintln(w, line)
		eventually.That(t, 10*time.Second, "the queue to have room", func() error {
			l.disk.mu.Lock()
			defer l.disk.mu.Unlock()
			if len(l.disk.queue) > queueLines/2 {
				return errors.New("full")
			}
			return nil
		})
	}
	l.Release()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != keepOld+1 {
		t.Fatalf("%v, %v", entries, err)
	}
	for _, e := range entries {
		if info, _ := e.Info(); info.Size() > maxFile || !strings.HasPrefix(e.Name(), "big_one.log") {
			t.Errorf("%s: %d bytes", e.Name(), info.Size())
		}
	}
}

func TestPersistTwiceFails(t *testing.T) {
	l := New(nil)
	dir := t.TempDir()
	if err := l.Persist(dir, 1); err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if err := l.Persist(dir, 1); err == nil {
		t.Error("no error")
	}
}

// A pod that collects logs can put links and FIFOs in the place of files: what they lead to is neither read nor
// written.
func TestNoLinksAmongTheFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	secret, link, fifo := filepath.Join(dir, "secret"), filepath.Join(dir, "kubelet.log"), filepath.Join(dir, "etcd.log")
	if err := errors.Join(os.WriteFile(secret, []byte("key"), 0o600), os.Symlink(secret, link), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, fifo} {
		if files, err := openFiles(path, 0); err == nil || len(files) > 0 {
			t.Errorf("%s is read: %v", path, err)
		}
		if f, err := openFile(path); err == nil {
			t.Errorf("%s is written: %v", path, f.Close())
		}
	}
}

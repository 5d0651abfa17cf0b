package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(builderEnv); dir != "" {
		buildForever(dir)
	}
	os.Exit(m.Run())
}

// builderEnv makes the test binary a builder that never finishes, for the tests to kill.
const builderEnv = "GARBOARD_TEST_BUILD_IN"

func buildForever(dir string) {
	s := &Store{Dir: dir}
	_, err := s.Build(context.Background(), "thing", []string{"1"}, func(_ context.Context, dir string) error {
		if err := os.WriteFile(filepath.Join(dir, "half"), nil, 0o644); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, os.Stdin) // until the test, or its end, ends this
		return err
	})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// writes is a build that leaves one file.
func writes(content string) func(context.Context, string) error {
	return func(_ context.Context, dir string) error {
		return os.WriteFile(filepath.Join(dir, "file"), []byte(content), 0o644)
	}
}

func never(t *testing.T) func(context.Context, string) error {
	return func(context.Context, string) error {
		t.Error("built although the result is there")
		return nil
	}
}

func names(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestHitNeedsNoBuild(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	first, err := s.Build(t.Context(), "thing", []string{"1"}, writes("a"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Build(t.Context(), "thing", []string{"1"}, never(t))
	if err != nil || second != first {
		t.Fatalf("second build: %q, %v; want %q", second, err, first)
	}
	other, err := s.Build(t.Context(), "thing", []string{"2"}, writes("b"))
	if err != nil || other == first {
		t.Fatalf("other inputs: %q, %v", other, err)
	}
	for dir, want := range map[string]string{first: "a", other: "b"} {
		if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", dir, got, err, want)
		}
	}
}

func TestParallelBuildersBuildOnce(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	var builds atomic.Int32
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			_, err := s.Build(t.Context(), "thing", []string{"1"}, func(ctx context.Context, dir string) error {
				builds.Add(1)
				return writes("a")(ctx, dir)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if builds.Load() != 1 {
		t.Errorf("built %d times", builds.Load())
	}
}

func TestFailedAndCancelledBuildsLeaveNothing(t *testing.T) {
	broken := errors.New("broken")
	ctx, cancel := context.WithCancel(t.Context())
	for name, build := range map[string]func(context.Context, string) error{
		"failed": func(ctx context.Context, dir string) error { return errors.Join(writes("half")(ctx, dir), broken) },
		"cancelled": func(ctx context.Context, dir string) error {
			cancel()
			return writes("half")(ctx, dir) // doesn't notice
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Store{Dir: t.TempDir()}
			_, err := s.Build(ctx, "thing", []string{"1"}, build)
			if !errors.Is(err, broken) && !errors.Is(err, context.Canceled) {
				t.Errorf("error: %v", err)
			}
			if left := names(t, filepath.Join(s.Dir, "thing", "*")); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
			if _, err := s.Build(t.Context(), "thing", []string{"1"}, writes("whole")); err != nil {
				t.Errorf("build again: %v", err)
			}
		})
	}
}

func TestWaiterGivesUpWhenCancelled(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Build(t.Context(), "thing", []string{"1"}, func(c context.Context, dir string) error {
		time.AfterFunc(3*lockPoll, cancel)
		_, err := s.Build(ctx, "thing", []string{"1"}, never(t))
		if !errors.Is(err, context.Canceled) {
			t.Errorf("waiter's error: %v", err)
		}
		return writes("a")(c, dir)
	})
	if err != nil {
		t.Error(err)
	}
}

func TestKilledBuilderLeavesNothingForLong(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	builder := exec.Command(os.Args[0])
	builder.Env = append(os.Environ(), builderEnv+"="+s.Dir)
	input, err := builder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	if err := builder.Start(); err != nil {
		t.Fatal(err)
	}
	temps := filepath.Join(s.Dir, "thing", "*"+tempMark+"*")
	eventually.That(t, 10*time.Second, "the builder is at work", func() error {
		if len(names(t, temps+"/half")) != 1 {
			return errors.New("it has written nothing yet")
		}
		return nil
	})
	// While it lives, its directory is left alone, also by a builder of other inputs.
	if _, err := s.Build(t.Context(), "thing", []string{"2"}, writes("b")); err != nil {
		t.Fatal(err)
	}
	if len(names(t, temps)) != 1 {
		t.Error("the living builder's directory was removed")
	}
	if err := builder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := builder.Wait(); err == nil {
		t.Error("the builder ended by itself")
	}
	if _, err := s.Build(t.Context(), "thing", []string{"3"}, writes("c")); err != nil {
		t.Fatal(err)
	}
	if left := names(t, temps); len(left) != 0 {
		t.Errorf("the dead builder's directory is still there: %v", left)
	}
	if _, err := s.Build(t.Context(), "thing", []string{"1"}, writes("a")); err != nil {
		t.Errorf("what the dead builder began can't be built: %v", err)
	}
}

func TestPruneKeepsTheNewestAndThoseOfTheLastHour(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	var dirs []string
	for i := range 5 {
		dir, err := s.Build(t.Context(), "thing", []string{fmt.Sprint(i)}, writes("x"))
		if err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("pruned although it was just used: %v", err)
		}
	}
	for i, dir := range dirs {
		at := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Build(t.Context(), "thing", []string{"3"}, never(t)); err != nil { // a use
		t.Fatal(err)
	}
	dir, err := s.Build(t.Context(), "thing", []string{"new"}, writes("x"))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range map[string]bool{dirs[0]: false, dirs[1]: false, dirs[2]: false, dirs[3]: true, dirs[4]: true, dir: true} {
		if _, err := os.Stat(i); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", i, err == nil, want)
		}
	}
	if locks := names(t, filepath.Join(s.Dir, "thing", "*"+lockSuffix)); len(locks) != keep {
		t.Errorf("%d lock files, want %d", len(locks), keep)
	}
}

func TestResultRemovedByHandIsBuiltAgain(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	for _, remove := range []func(string) error{os.RemoveAll, func(string) error { return os.RemoveAll(filepath.Join(s.Dir, "thing")) }} {
		dir, err := s.Build(t.Context(), "thing", []string{"1"}, writes("a"))
		if err != nil {
			t.Fatal(err)
		}
		if err := remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	if dir, err := s.Build(t.Context(), "thing", []string{"1"}, writes("a")); err != nil {
		t.Error(err)
	} else if _, err := os.Stat(filepath.Join(dir, "file")); err != nil {
		t.Error(err)
	}
}

func TestNamesThatWouldEscape(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	for _, name := range []string{"", ".", "..", "a/b", "/a", ".hidden"} {
		if _, err := s.Build(t.Context(), name, nil, never(t)); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
}

func TestKeySeparatesInputs(t *testing.T) {
	keys := map[string]bool{Key(): true, Key(""): true, Key("ab", "c"): true, Key("a", "bc"): true, Key("abc"): true}
	if len(keys) != 5 {
		t.Errorf("%d different keys, want 5", len(keys))
	}
}

func TestHashTreeSeesWhatCounts(t *testing.T) {
	dir := t.TempDir()
	file, sub := filepath.Join(dir, "file"), filepath.Join(dir, "sub")
	steps := []struct {
		what    string
		do      func() error
		changes bool
	}{
		{"a file", func() error { return os.WriteFile(file, []byte("a"), 0o644) }, true},
		{"the umask's bits", func() error { return os.Chmod(file, 0o664) }, false},
		{"the time", func() error { return os.Chtimes(file, time.Unix(1, 0), time.Unix(1, 0)) }, false},
		{"content", func() error { return os.WriteFile(file, []byte("b"), 0o644) }, true},
		{"executable", func() error { return os.Chmod(file, 0o755) }, true},
		{"a directory", func() error { return os.Mkdir(sub, 0o755) }, true},
		{"a link", func() error { return os.Symlink("file", filepath.Join(sub, "link")) }, true},
		{"its target", func() error {
			return errors.Join(os.Remove(filepath.Join(sub, "link")), os.Symlink("elsewhere", filepath.Join(sub, "link")))
		}, true},
		{"a name", func() error { return os.Rename(file, filepath.Join(dir, "renamed")) }, true},
	}
	before, err := HashTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		after, err := HashTree(dir)
		if err != nil {
			t.Fatal(err)
		}
		if (after != before) != step.changes {
			t.Errorf("%s: hash changed: %v, want %v", step.what, after != before, step.changes)
		}
		before = after
	}
	if _, err := HashTree(filepath.Join(dir, "missing")); err == nil {
		t.Error("a missing path has a hash")
	}
}

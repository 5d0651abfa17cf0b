package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStoryFolders(t *testing.T) {
	root := t.TempDir()
	const a, b = "\nfunc TestA(t *testing.T) {}\n", "\nfunc TestB(t *testing.T) {}\n"
	for path, text := range map[string]string{
		"b/b_test.go": longTag + "package b\n// " + machineWord + a, "a/one_test.go": longTag + "package a" + a, "a/two_test.go": longTag + "package a" + b,
		"c/c_test.go": "//go:build story\npackage c" + a, "d/d.go": longTag + a,
		"e/one_test.go": "package e" + b, "e/two_test.go": "//go:build story\nvar _ = " + machineWord + a,
		"f/f_test.go": "package f", "c/module/go.mod": "module m", "c/module/m_test.go": "//go:build story\npackage m" + a,
		"g/g_test.go": "//go:build story\npackage g" + a, "g/machine_test.go": longTag + "package g\n// " + machineWord + b,
		"services/i/i_test.go": "package i" + a, "services/i/real_test.go": "//go:build story\npackage i" + b, "services/j/j_test.go": "package j" + a,
		"h/h_test.go": longTag + "package h" + a, "h/main_test.go": "//go:build story\nfunc TestMain(m *testing.M) { }",
	} {
		if !strings.HasPrefix(path, "services/") {
			path = filepath.Join("qemu", "stories", path)
		}
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := storyFolders(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []storyFolder{
		{path: "./qemu/stories/a", long: []string{"TestA", "TestB"}}, {path: "./qemu/stories/b", long: []string{"TestA"}},
		{path: "./qemu/stories/c", short: []string{"TestA"}}, {path: "./qemu/stories/e", short: []string{"TestA"}, machines: true},
		{path: "./qemu/stories/g", short: []string{"TestA"}, long: []string{"TestB"}}, {path: "./qemu/stories/h", long: []string{"TestA"}},
		{path: "./services/i", short: []string{"TestB"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(storyFolder{})); diff != "" {
		t.Error(diff)
	}
}

func TestLongStoriesAreAllListed(t *testing.T) {
	t.Parallel()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	folders, err := storyFolders(root)
	if err != nil {
		t.Fatal(err)
	}
	want, got := map[string]string{}, map[string]string{}
	for _, f := range folders {
		for _, name := range f.long {
			want[name] = f.path
		}
	}
	for _, s := range longOnes {
		got[s.name] = s.folder
	}
	if len(want) == 0 || len(got) != len(longOnes) {
		t.Errorf("%d are found, and %d of %d listed have names of their own", len(want), len(got), len(longOnes))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what begins with %s and what longOnes lists (-files +list):\n%s", strings.TrimSpace(longTag), diff)
	}
}

// What doesn't fit is left out and named, also where the machine is slower than the one
// that was measured; what fits and yet doesn't end fails.
func TestLongStoriesThatFit(t *testing.T) {
	t.Parallel()
	all := []longStory{{"TestA", "a", time.Minute}, {"TestB", "b", 10 * time.Minute}, {"TestC", "c", 2 * time.Minute}}
	broken := errors.New("it broke")
	for _, test := range []struct {
		name   string
		within time.Duration // 0: without a limit
		took   map[string]time.Duration
		err    error
		ran    string
		want   error
	}{
		{"no limit", 0, map[string]time.Duration{"TestA": time.Hour}, nil, "TestA TestB TestC", nil},
		{"time enough", time.Hour, nil, nil, "TestA TestB TestC", nil},
		{"no time", 1, nil, nil, "", leftOut{"TestA", "TestB", "TestC"}},
		{"the long one doesn't fit", 20 * time.Minute, nil, nil, "TestA TestC", leftOut{"TestB"}},
		{"a slow machine", time.Hour, map[string]time.Duration{"TestA": 3 * time.Minute}, nil, "TestA TestC", leftOut{"TestB"}},
		{"a fast machine", 16 * time.Minute, map[string]time.Duration{"TestA": 30 * time.Second}, nil, "TestA TestB TestC", nil},
		{"fast at first", 14 * time.Minute, map[string]time.Duration{"TestA": time.Second}, nil, "TestA TestC", leftOut{"TestB"}},
		{"it hangs", time.Hour, map[string]time.Duration{"TestB": 2 * time.Hour}, nil, "TestA TestB", context.DeadlineExceeded},
		{"it fails", time.Hour, nil, broken, "TestA", broken},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if test.within != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.within)
					defer cancel()
				}
				var ran []string
				err := fitting(ctx, all, io.Discard, func(s longStory) error {
					ran = append(ran, s.name)
					takes := s.takes
					if given, ok := test.took[s.name]; ok {
						takes = given
					}
					select {
					case <-time.After(takes):
						return test.err
					case <-ctx.Done():
						return ctx.Err()
					}
				})
				if got := strings.Join(ran, " "); got != test.ran {
					t.Errorf("it ran %q, not %q", got, test.ran)
				}
				var left leftOut
				if errors.As(err, &left) {
					if diff := cmp.Diff(test.want, error(left)); diff != "" {
						t.Error(diff)
					}
				} else if !errors.Is(err, test.want) {
					t.Errorf("%v, not %v", err, test.want)
				}
			})
		})
	}
}

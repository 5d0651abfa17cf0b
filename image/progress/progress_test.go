package progress

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/google/go-cmp/cmp"
)

// run is a reporter on a terminal of a width, or on none.
type run struct {
	*Reporter
	out strings.Builder
}

func newRun(width int) *run {
	r := &run{}
	r.Reporter = New(&r.out)
	if width > 0 {
		r.width = func() int { return width }
	}
	return r
}

// lasting does a step that takes so many seconds.
func (r *run) lasting(t *testing.T, name string, seconds int, end error) {
	t.Helper()
	if err := r.step(name, func() error { time.Sleep(time.Duration(seconds)*time.Second + time.Millisecond); return end }); err != end {
		t.Errorf("%s: %v, want %v", name, err, end)
	}
}

func TestLinesInALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRun(0)
		r.Plan("kubernetes", "etcd", "pause")
		r.Plan("etcd", "images") // whoever runs a part announces it once more
		r.lasting(t, "kubernetes", 50, nil)
		r.lasting(t, "pause", 1, nil) // too quick to mention
		r.lasting(t, "etcd", 3, errors.New("no space left on device"))
		r.lasting(t, "images", 0, errors.New("at once"))
		r.lasting(t, "images", 1, fmt.Errorf("go build: %w", context.Canceled))
		want := `[1/4] building kubernetes …
[1/4] building kubernetes … 17s
[1/4] building kubernetes … 32s
[1/4] building kubernetes … 47s
[1/4] kubernetes built in 50s
[2/4] building etcd …
[2/4] etcd failed after 3s: no space left on device
[4/4] images failed after 0s: at once
[4/4] images interrupted after 1s
`
		if diff := cmp.Diff(want, r.out.String()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestLiveLineOnATerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRun(29)
		r.Plan("etcd", "containerd")
		r.lasting(t, "etcd", 3, nil)
		r.lasting(t, "containerd", 2, nil)
		want := clearLine + "[1/2] building etcd … 2s" +
			clearLine + "[1/2] building etcd … 3s" +
			clearLine + "[1/2] etcd built in 3s\n" +
			clearLine + "[2/2] building containerd …" + "…" + // cut off at the width
			clearLine + "[2/2] containerd built in 2s\n"
		if diff := cmp.Diff(want, r.out.String()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestCachedStepsAreOneLine(t *testing.T) {
	t.Parallel()
	r, store := newRun(0), &cache.Store{Dir: t.TempDir()}
	for range 2 {
		for _, name := range []string{"etcd", "runc"} {
			if _, err := r.Build(t.Context(), store, name, nil, func(context.Context, string) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		r.Summary("components", "etcd", "runc")
	}
	if got, want := r.out.String(), "2 of 2 components cached\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

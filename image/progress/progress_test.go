package progress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// run is a reporter whose clock and ticks the test makes.
type run struct {
	*Reporter
	out   strings.Builder
	clock time.Time
}

func newRun(width int) *run {
	r := &run{clock: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	r.Reporter = New(&r.out)
	r.now = func() time.Time { return r.clock }
	r.ticking = true // keeps the real ticker from starting
	if width > 0 {
		r.width = func() int { return width }
	}
	return r
}

// pass lets seconds go by, with a tick after each.
func (r *run) pass(seconds int) {
	for range seconds {
		r.clock = r.clock.Add(time.Second)
		r.tick()
		r.ticking = true
	}
}

func TestLinesInALog(t *testing.T) {
	r := newRun(0)
	r.Plan("kubernetes", "etcd", "pause")
	r.Plan("etcd", "images") // whoever runs a part announces it once more

	end := r.Step("kubernetes")
	r.pass(50)
	end(nil)
	end(errors.New("told twice")) // has no effect
	end = r.Step("pause")
	r.pass(1)
	end(nil) // too quick to mention
	end = r.Step("etcd")
	r.pass(3)
	end(errors.New("no space left on device"))
	end = r.Step("images")
	end(errors.New("at once"))
	end = r.Step("images")
	r.pass(1)
	end(fmt.Errorf("go build: %w", context.Canceled))

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
}

func TestLiveLineOnATerminal(t *testing.T) {
	r := newRun(48)
	r.Plan("etcd", "runc")
	endEtcd := r.Step("etcd")
	endRunc := r.Step("runc")
	r.pass(2)
	endRunc(nil)
	r.pass(1)
	endEtcd(nil)

	const clear = "\r\x1b[K"
	want := clear + "[1/2] building etcd … 2s   [2/2] building runc…" + // cut off at the width
		clear + "[2/2] runc built in 2s\n" +
		clear + "[1/2] building etcd … 2s" +
		clear + "[1/2] building etcd … 3s" +
		clear + "[1/2] etcd built in 3s\n"
	if diff := cmp.Diff(want, r.out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestCachedStepsAreOneLine(t *testing.T) {
	r := newRun(0)
	r.Plan("etcd", "runc")
	r.Summary("components", "etcd", "runc")
	r.Cached("etcd")
	r.Cached("runc")
	r.Summary("components", "etcd", "runc")
	if got, want := r.out.String(), "2 of 2 components cached\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNilReporterIsSilent(t *testing.T) {
	var r *Reporter
	r.Plan("a")
	r.Cached("a")
	r.Summary("things", "a")
	r.Step("a")(errors.New("unheard"))
}

func TestRealTickerEndsWithTheLastStep(t *testing.T) {
	r := New(io.Discard)
	r.Step("etcd")(nil)
	eventually.That(t, 5*time.Second, "the ticker stops", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.ticking {
			return errors.New("it still ticks")
		}
		return nil
	})
}

func TestRound(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0s", 59*time.Second + 600*time.Millisecond: "1m00s", 61 * time.Second: "1m01s", 3 * time.Hour: "180m00s"} {
		if got := round(d); got != want {
			t.Errorf("round(%v) = %q, want %q", d, got, want)
		}
	}
}

// Package eventually waits in tests for a condition instead of for a time.
//
// Deadlines are written for an idle machine at native speed and scaled here, in
// one place: by how slow this machine is found to be, and by the caller's own
// factor for guests under software emulation. Time that the machine lost meanwhile,
// because it stood still or gave its processors to others, doesn't count (see Lost).
//
// Such deadlines only end what hangs: the product's own use of the machine counts as the
// machine's slowness. A time that is promised to users is measured by a Pace.
package eventually

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"
)

const (
	pollFirst = 2 * time.Millisecond   // quick conditions cost nothing
	pollMax   = 250 * time.Millisecond // slow ones don't burn the cores

	// A loop of so many rounds takes about reference on one idle 3 GHz core.
	rounds    = 20_000_000
	reference = 20 * time.Millisecond
	// So many writes, each on the disk before the next, take less than writing where a
	// write takes what etcd calls too slow (https://etcd.io/docs/v3.6/faq: 10 ms).
	writes  = 8
	writing = writes * 10 * time.Millisecond
	// slowest bounds the scale, so that a machine that stood still for a moment
	// doesn't turn a minute into an hour.
	slowest = 8
)

// found is the worst that was measured so far, and measuring lets one at a time measure.
var (
	measuring sync.Mutex
	found     float64
)

// Slowdown is how many times slower than an idle, current machine this one was found to
// be at worst, its processor or the disk of its temporary files: 1 to 8. It is measured
// when it is first asked for, and again by That and Context before they give up, because
// tests share their machine with others that come and go. It isn't for bubbles of
// testing/synctest: what watches the machine from then on never ends.
func Slowdown() float64 {
	measuring.Lock()
	defer measuring.Unlock()
	if found == 0 {
		found = measure()
		go watch() // to the end of the process: there is no moment at which no test waits
	}
	return found
}

// again measures once more.
func again() {
	now := measure()
	measuring.Lock()
	defer measuring.Unlock()
	found = max(found, now)
}

func measure() float64 { return min(max(processor(), disk(), 1), slowest) }

func processor() float64 {
	start := time.Now()
	x := uint64(88172645463325252)
	for range rounds { // xorshift64, Marsaglia 2003: nothing to optimise away
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	if x == 0 {
		panic("xorshift64 never is zero")
	}
	return float64(time.Since(start)) / float64(reference)
}

// disk is 0 where there is none to write to: whatever needs it says so better.
func disk() float64 {
	f, err := os.CreateTemp("", "eventually-")
	if err != nil {
		return 0
	}
	defer os.Remove(f.Name())
	defer f.Close()
	start := time.Now()
	for range writes {
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			return 0
		}
		if err := f.Sync(); err != nil || time.Since(start) > slowest*writing {
			break
		}
	}
	return float64(time.Since(start)) / float64(writing)
}

// Scale is d on this machine.
func Scale(d time.Duration) time.Duration {
	return time.Duration(float64(d) * Slowdown())
}

// That polls check until it returns nil and ends the test, with check's last
// error, when it doesn't within the scaled deadline. name says in words what
// should come true.
func That(t testing.TB, deadline time.Duration, name string, check func() error) {
	t.Helper()
	start := time.Now()
	for wait := pollFirst; ; wait = min(wait*2, pollMax) {
		late := over(start, deadline)
		err := check()
		if err == nil {
			return
		}
		if late {
			t.Fatalf("not within %s: %s: %v", Scale(deadline), name, err)
		}
		time.Sleep(wait)
	}
}

// Took says what was wrong with something that took from start to end: that this is
// longer than the scaled limit, without what the machine lost. It isn't for promises to
// users: see Pace.
func Took(start, end time.Time, limit time.Duration) error {
	if took := end.Sub(start) - Lost(start, end); took > Scale(limit) {
		return fmt.Errorf("it took %s, and %s are allowed", took.Round(time.Millisecond), Scale(limit))
	}
	return nil
}

// over tells whether the time is up, and measures again before it says so.
func over(start time.Time, deadline time.Duration) bool {
	if Took(start, time.Now(), deadline) == nil {
		return false
	}
	again()
	return Took(start, time.Now(), deadline) != nil
}

// Context ends when the scaled time is over.
func Context(parent context.Context, deadline time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	start := time.Now()
	go func() {
		for {
			now := time.Now()
			left := Scale(deadline) + Lost(start, now) - now.Sub(start)
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(left, pollFirst)):
			}
			if over(start, deadline) {
				cancel(fmt.Errorf("not within %s: %w", Scale(deadline), context.DeadlineExceeded))
				return
			}
		}
	}()
	return ctx, func() { cancel(context.Canceled) }
}

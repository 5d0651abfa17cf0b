// Package eventually waits in tests for a condition instead of for a time.
//
// Deadlines are written for an idle machine at native speed and scaled here, in
// one place: by how slow this machine is found to be, and by the caller's own
// factor for guests under software emulation.
package eventually

import (
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
// be at worst: 1 to 8. It is measured when it is first asked for, and again by That
// before it gives up, because tests share their machine with others that come and go.
func Slowdown() float64 {
	measuring.Lock()
	defer measuring.Unlock()
	if found == 0 {
		found = measure()
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

func measure() float64 {
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
	return min(max(float64(time.Since(start))/float64(reference), 1), slowest)
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
		err := check()
		if err == nil {
			return
		}
		if time.Since(start) > Scale(deadline) {
			if again(); time.Since(start) > Scale(deadline) {
				t.Fatalf("not within %s: %s: %v", Scale(deadline), name, err)
			}
		}
		time.Sleep(wait)
	}
}

// Package eventually waits in tests for a condition instead of for a time.
//
// Deadlines are written for an idle machine at native speed and scaled here, in
// one place: by GARBOARD_TEST_SLOWDOWN where it is set (the test runner measures
// it), and by the caller's factor for guests under software emulation.
package eventually

import (
	"os"
	"strconv"
	"testing"
	"time"
)

const (
	pollFirst = 2 * time.Millisecond   // quick conditions cost nothing
	pollMax   = 250 * time.Millisecond // slow ones don't burn the two cores
)

// Slowdown is how many times slower than the reference this machine is: at
// least 1.
func Slowdown() float64 {
	f, err := strconv.ParseFloat(os.Getenv("GARBOARD_TEST_SLOWDOWN"), 64)
	if err != nil || f < 1 {
		return 1
	}
	return f
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
	end := time.Now().Add(Scale(deadline))
	for wait := pollFirst; ; wait = min(wait*2, pollMax) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s: %v", Scale(deadline), name, err)
		}
		time.Sleep(wait)
	}
}

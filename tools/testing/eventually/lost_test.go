package eventually

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// What is lost counts where it was lost, and no more than there was.
func TestWhatWasLost(t *testing.T) {
	t.Parallel()
	zero := time.Now()
	at := func(seconds int) time.Time { return zero.Add(time.Duration(seconds) * time.Second) }
	var d diary
	d.end(pause{at(10), at(20), 8 * time.Second})
	d.end(pause{at(20), at(21), -time.Second}) // it came in time
	d.end(pause{at(28), at(31), 2 * time.Second})
	for _, tc := range []struct{ from, to, lost int }{
		{0, 40, 10}, {0, 28, 8}, {10, 20, 8}, {12, 18, 6}, {0, 13, 3}, {18, 29, 3}, {0, 10, 0}, {0, 5, 0}, {20, 28, 0}, {31, 40, 0},
	} {
		if got := d.lost(at(tc.from), at(tc.to)); got != time.Duration(tc.lost)*time.Second {
			t.Errorf("from %d to %d: %s, want %d s", tc.from, tc.to, got, tc.lost)
		}
	}
}

// A disk that stalls is seen while it does.
func TestAStallIsSeenBeforeItsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var d diary
		d.begin(start)
		time.Sleep(beat)
		if lost := d.lost(start, time.Now()); lost != 0 {
			t.Errorf("%s are lost in a look of the usual length", lost)
		}
		time.Sleep(9 * time.Second)
		if lost := d.lost(start, time.Now()); lost != 9*time.Second-usual {
			t.Errorf("%s are lost", lost)
		}
		// The twin: what began after it.
		now := time.Now()
		time.Sleep(time.Second)
		d.end(pause{start, now, 9 * time.Second})
		if lost := d.lost(now, time.Now()); lost != 0 {
			t.Errorf("%s are lost after it", lost)
		}
	})
}

// A condition that came true while the machine was measured is seen.
func TestTheLastLookComesAfterMeasuring(t *testing.T) {
	t.Parallel()
	start := time.Now()
	That(t, time.Nanosecond, "less than measuring takes", func() error {
		if time.Since(start) < time.Millisecond {
			return errors.New("too early")
		}
		return nil
	})
}

func TestTook(t *testing.T) {
	t.Parallel()
	start := time.Now().Add(-time.Hour) // nobody had looked yet
	if err := Took(start, start.Add(time.Second), time.Second); err != nil {
		t.Error(err)
	}
	if err := Took(start, start.Add(2*slowest*time.Second), time.Second); err == nil {
		t.Error("it took twice as long as on the slowest machine")
	}
}

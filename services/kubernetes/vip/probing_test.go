package vip

import (
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/system/neighbor"
)

// A process that was frozen after its first probe has received no answers, however
// long that was: it probes as often as any other one before it takes the address.
func TestAFrozenProcessDoesNotCountAsProbing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for w.probed == 0 {
		w.pass(100 * time.Millisecond)
	}
	w.now = w.now.Add(2 * probeTime)
	w.step(false)
	w.want(false, "")
	w.now = w.now.Add(probeEvery / 4) // something happens: the next probe isn't delayed
	w.step(false)
	if again := w.last.again; again != probeEvery*3/4 {
		t.Errorf("it looks again after %s", again)
	}
	w.pass(probeTime)
	w.want(true, "elected")
	if w.probed != 3 {
		t.Errorf("it asked %d times, want 3", w.probed)
	}
}

func TestForeignMachineHasIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pass(100 * time.Millisecond)
	w.pass(800 * time.Millisecond)
	for range 3 {
		w.pass(100 * time.Millisecond)
		w.observe(neighbor.Reply, foreignMAC)
	}
	w.want(false, foreignMAC.String())
	if w.last.candidate || w.s.foreign != foreignMAC.String() {
		t.Errorf("it is a candidate: %v; the foreign is %q", w.last.candidate, w.s.foreign)
	}
	// Without an answer at the next attempt, the foreign machine is gone.
	w.pass(foreignPause + 2*time.Second)
	w.want(true, "elected")
	if w.s.foreign != "" {
		t.Errorf("the foreign is still %q", w.s.foreign)
	}
	// A foreign machine that comes later is reported, and doesn't get the address.
	w.pass(5 * time.Second)
	w.announced = 0
	w.observe(neighbor.Announcement, foreignMAC)
	w.want(true, "elected")
	if w.announced != 1 || w.s.foreign != foreignMAC.String() {
		t.Errorf("announced %d times; the foreign is %q", w.announced, w.s.foreign)
	}
}

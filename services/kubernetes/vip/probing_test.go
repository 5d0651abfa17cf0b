package vip

import (
	"testing"
	"time"
)

// A process that stands still after its first question has heard no answer, however long
// that was: it asks as often as any other one before it takes the address.
func TestAFrozenProcessDoesNotCountAsProbing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for w.probed == 0 {
		w.pass(100 * time.Millisecond)
	}
	w.now = w.now.Add(2 * probeTime)
	w.step(false)
	w.want(false, "")
	w.now = w.now.Add(probeEvery / 4) // something comes: the next question isn't put off
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
		w.observe(observedReply, foreignMAC)
	}
	w.want(false, foreignMAC.String())
	if w.last.candidate || w.s.foreign != foreignMAC.String() {
		t.Errorf("it is a candidate: %v; the foreign is %q", w.last.candidate, w.s.foreign)
	}
	// Without an answer at the next try, the foreign is gone.
	w.pass(foreignPause + 2*time.Second)
	w.want(true, "elected")
	if w.s.foreign != "" {
		t.Errorf("the foreign is still %q", w.s.foreign)
	}
	// One that comes later is named, and doesn't get the address.
	w.pass(5 * time.Second)
	w.announced = 0
	w.observe(observedAnnouncement, foreignMAC)
	w.want(true, "elected")
	if w.announced != 1 || w.s.foreign != foreignMAC.String() {
		t.Errorf("announced %d times; the foreign is %q", w.announced, w.s.foreign)
	}
}

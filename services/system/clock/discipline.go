package clock

import (
	"math"
	"time"
)

// Constants of RFC 5905, appendix A.1.1.
const (
	// stepThreshold (STEPT): the clock is set when it is off by this much; by
	// less it is pulled.
	stepThreshold = 128 * time.Millisecond
	// stepOut (WATCH): how long it must be off by that much, once it was right:
	// a burst of delayed packets must not make the clock jump.
	stepOut = 900 * time.Second
	minPoll = 6  // MINPOLL: 2^6 = 64 s between questions
	maxPoll = 10 // MAXPOLL is 17; 2^10 = 1024 s still sees a drifting clock within the hour
	// pollGate (PGATE) and pollLimit (LIMIT): the interval doubles after a row of
	// offsets below pollGate times the jitter, and halves after some above.
	pollGate  = 4
	pollLimit = 30
	// jitterAverage (AVG) is how many samples the jitter is averaged over.
	jitterAverage = 4
	// minJitter is about what a quiet local network has: below it all is noise.
	minJitter = time.Millisecond
)

// discipline decides what an offset means (RFC 5905 §11.3, simplified: the
// kernel's loop does phase and frequency).
type discipline struct {
	synced  bool
	poll    int // exponent of the interval
	counter int
	last    time.Duration // the last offset
	jitter  time.Duration
	since   time.Time // since when the clock has been off by more than the threshold
}

// action on the clock.
type action int

const (
	pull action = iota
	step
	wait // for whether it stays like that
)

// decide takes one offset in; now is monotonic.
func (d *discipline) decide(offset time.Duration, now time.Time) action {
	if d.poll == 0 {
		d.poll, d.jitter = minPoll, minJitter
	}
	if offset.Abs() >= stepThreshold {
		if d.since.IsZero() {
			d.since = now
		}
		if d.synced && now.Sub(d.since) < stepOut {
			d.poll, d.counter = minPoll, 0 // look closer
			return wait
		}
		*d = discipline{synced: true, poll: minPoll, jitter: minJitter}
		return step
	}
	d.since = time.Time{}
	d.note(offset)
	d.synced = true
	return pull
}

func (d *discipline) note(offset time.Duration) {
	if d.synced {
		diff := float64(offset - d.last)
		old := float64(d.jitter)
		d.jitter = max(minJitter, time.Duration(math.Sqrt(old*old+(diff*diff-old*old)/jitterAverage)))
	}
	d.last = offset
	if offset.Abs() < pollGate*d.jitter {
		d.counter += d.poll
	} else {
		d.counter -= 2 * d.poll
	}
	switch {
	case d.counter > pollLimit:
		d.poll, d.counter = min(d.poll+1, maxPoll), 0
	case d.counter < -pollLimit:
		d.poll, d.counter = max(d.poll-1, minPoll), 0
	}
}

// interval until the next question.
func (d *discipline) interval() time.Duration { return time.Second << max(d.poll, minPoll) }

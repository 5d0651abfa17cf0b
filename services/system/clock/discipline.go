package clock

import (
	"math"
	"time"
)

// Constants of RFC 5905, appendix A.1.1.
const (
	// stepThreshold (STEPT): a clock with at least this offset is set; with a
	// smaller one it is slewed.
	stepThreshold = 128 * time.Millisecond
	// stepOut (WATCH): how long a clock that was right must have such an offset
	// before it is set: a burst of delayed packets must not cause a step.
	stepOut = 900 * time.Second
	minPoll = 6  // MINPOLL: 2^6 = 64 s between queries
	maxPoll = 10 // MAXPOLL is 17; 2^10 = 1024 s still detects a drifting clock within the hour
	// pollGate (PGATE) and pollLimit (LIMIT): the interval doubles after several
	// offsets below pollGate times the jitter, and halves after some above.
	pollGate  = 4
	pollLimit = 30
	// jitterAverage (AVG) is the number of samples in the average of the jitter.
	jitterAverage = 4
	// minJitter is about that of a quiet local network: smaller values are noise.
	minJitter = time.Millisecond
)

// discipline decides what to do after an offset (RFC 5905 §11.3, simplified:
// the kernel's loop does phase and frequency).
type discipline struct {
	synced  bool
	poll    int // exponent of the interval
	counter int
	last    time.Duration // the last offset
	jitter  time.Duration
	since   time.Time // when the offset became larger than the threshold
}

// action on the clock.
type action int

const (
	pull action = iota
	step
	wait // until it is clear whether the offset stays
)

// decide processes one offset; now is monotonic.
func (d *discipline) decide(offset time.Duration, now time.Time) action {
	if d.poll == 0 {
		d.poll, d.jitter = minPoll, minJitter
	}
	if offset.Abs() >= stepThreshold {
		if d.since.IsZero() {
			d.since = now
		}
		if d.synced && now.Sub(d.since) < stepOut {
			d.poll, d.counter = minPoll, 0 // query more often
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

// interval until the next query.
func (d *discipline) interval() time.Duration { return time.Second << max(d.poll, minPoll) }

package dag

import (
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// RestartFirst is the pause before the first restart: short, because most
	// failures don't repeat.
	RestartFirst = 500 * time.Millisecond
	// RestartMax is the longest pause: a node that lacks something tries again
	// soon after it is available.
	RestartMax = 30 * time.Second
	// RestartReset is how long a run must have been in state Running before the
	// pause is short again.
	RestartReset = time.Minute
	// LoopRestarts within LoopWindow are a crash loop: with the pauses above, one
	// of more than a minute.
	LoopRestarts = 8
	LoopWindow   = 5 * time.Minute
	// LoopPause is the pause in a crash loop: it spares the disk and the log, and
	// is short enough for a user who has fixed the cause.
	LoopPause = 2 * time.Minute
)

// pace determines the pause before a restart.
type pace struct {
	delay   time.Duration // the last one, 0 at first
	recent  []time.Time   // restarts, LoopRestarts at most
	looping bool          // in a crash loop, until a run was stable
}

// next is called after a run that was Running for the time ran.
func (p *pace) next(now time.Time, ran time.Duration) (pause time.Duration, looping bool) {
	if ran >= RestartReset {
		*p = pace{}
	}
	p.recent = append(p.recent, now)
	if len(p.recent) > LoopRestarts {
		p.recent = p.recent[1:]
	}
	if len(p.recent) == LoopRestarts && now.Sub(p.recent[0]) <= LoopWindow {
		p.looping = true
	}
	if p.looping {
		return LoopPause, true
	}
	p.delay = sleep.Longer(p.delay, RestartFirst, RestartMax)
	return p.delay, false
}

package eventually

import (
	"os"
	"sync"
	"time"
)

const (
	// beat is how often it is looked whether the machine keeps up.
	beat = time.Second
	// usual is what a look may take longer than that, beside other tests.
	usual = 100 * time.Millisecond
	// busy is how many times slower than Slowdown says, which deadlines are scaled by, a
	// processor may be.
	busy = 2
)

// A pause is a look at the machine that took longer than it should.
type pause struct {
	from, to time.Time
	lost     time.Duration
}

// diary is when the machine didn't keep up.
type diary struct {
	mu      sync.Mutex // guards all below
	pauses  []pause
	looking time.Time // since when the look under way takes
}

var kept diary

// Lost is how much of the time between both the machine didn't give to anybody here: one
// write to the disk of temporary files, a sleep or a loop took so much longer than they
// should. It is known to about a second, and since the first call of Slowdown.
func Lost(from, to time.Time) time.Duration { return kept.lost(from, to) }

func (d *diary) lost(from, to time.Time) (lost time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pauses {
		lost += p.within(from, to)
	}
	if !d.looking.IsZero() {
		now := time.Now()
		lost += pause{d.looking, now, now.Sub(d.looking) - beat - usual}.within(from, to)
	}
	return lost
}

// begin and end are those of a look.
func (d *diary) begin(at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looking = at
}

func (d *diary) end(p pause) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looking = time.Time{}
	if p.lost > 0 {
		d.pauses = append(d.pauses, p)
	}
}

// within is the part of the pause between both.
func (p pause) within(from, to time.Time) time.Duration {
	if p.from.After(from) {
		from = p.from
	}
	if p.to.Before(to) {
		to = p.to
	}
	return max(min(to.Sub(from), p.lost), 0)
}

// watch keeps the diary.
func watch() {
	f, err := os.CreateTemp("", "eventually-")
	if err == nil {
		os.Remove(f.Name()) // nothing is left behind, however the process ends
	}
	for {
		began := time.Now()
		kept.begin(began)
		kept.end(look(f, began))
	}
}

// look sleeps for a beat, writes and calculates. f is nil where there is no disk.
func look(f *os.File, began time.Time) pause {
	time.Sleep(beat)
	if f != nil {
		// An error means a full disk, which takes no time.
		if _, err := f.WriteAt(make([]byte, 4096), 0); err == nil {
			_ = f.Sync()
		}
	}
	stood := max(time.Since(began)-beat-usual, 0)
	slower := processor() / Slowdown()
	p := pause{from: began, to: time.Now(), lost: stood}
	if slower > busy {
		p.lost += time.Duration(float64(p.to.Sub(began)-stood) * (1 - 1/slower))
	}
	return p
}

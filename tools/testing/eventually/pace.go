package eventually

import (
	"fmt"
	"slices"
	"time"
)

// samples are odd in number, so that one of them is the median: a blip of the machine
// doesn't count.
const samples = 5

// Pace is how many times slower than an idle, current machine this one was at one
// moment, 1 to 8. A time that is promised to users is compared with the pace from before
// the product did anything. Slowdown and Lost are no measure for that: they see what the
// product itself takes of the processors and the disk, and would excuse it.
type Pace float64

// Measure takes some short samples of the processor and of the disk of temporary files.
// A test calls it once, before it starts what it measures.
func Measure() Pace { return median(processor, disk) }

// median is the slowest of the probes, each by the median of its samples.
func median(probes ...func() float64) Pace {
	slow := 1.0
	for _, probe := range probes {
		var all [samples]float64
		for i := range all {
			all[i] = probe()
		}
		slices.Sort(all[:])
		slow = max(slow, all[samples/2])
	}
	return Pace(min(slow, slowest))
}

// Kept is nil if what took from start to end took no longer than was promised.
func (p Pace) Kept(start, end time.Time, promise time.Duration) error {
	allowed := time.Duration(float64(promise) * float64(p))
	if took := end.Sub(start); took > allowed {
		return fmt.Errorf("it took %s; %s are promised, and %s allowed on this machine, which was %.1f times slower than an idle one before the test",
			took.Round(time.Millisecond), promise, allowed.Round(time.Millisecond), float64(p))
	}
	return nil
}

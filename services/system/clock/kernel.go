package clock

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Modes and status bits of adjtimex(2), from linux/timex.h.
const (
	adjOffset    = 0x0001
	adjMaxError  = 0x0004
	adjEstError  = 0x0008
	adjStatus    = 0x0010
	adjTimeConst = 0x0020
	adjNano      = 0x2000

	staPLL = 0x0001 // the kernel's loop follows our offsets
	staIns = 0x0010 // a leap second comes at the end of the day
	staDel = 0x0020
)

// maxSlew is the largest offset that the kernel's loop accepts (MAXPHASE in the
// kernel's timex.h).
const maxSlew = 500 * time.Millisecond

// machineClock is the real one.
type machineClock struct{}

// Now has no monotonic part, which goes on as if the clock was never set.
func (machineClock) Now() time.Time { return time.Now().Round(0) }

func (machineClock) Set(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set clock to %s: %w", t.UTC().Format(time.RFC3339), err)
	}
	return nil
}

func (machineClock) Adjust(tx *unix.Timex) error {
	if _, err := unix.Adjtimex(tx); err != nil {
		return fmt.Errorf("adjust clock: %w", err)
	}
	return nil
}

// slew gives the offset of the clock to the kernel's phase-locked loop. A
// status without STA_UNSYNC also makes the kernel write the hardware clock
// every eleven minutes. The time constant is four less than the poll exponent.
// So an offset is corrected by the next poll (its half-life is a sixteenth of
// the interval), and the loop determines the clock's drift within a few polls.
func slew(k kernel, offset, maxError, jitter time.Duration, poll int, leap int32) error {
	return k.Adjust(&unix.Timex{
		Modes:    adjOffset | adjStatus | adjNano | adjTimeConst | adjMaxError | adjEstError,
		Offset:   int64(max(min(offset, maxSlew), -maxSlew)),
		Status:   staPLL | leap,
		Constant: int64(max(poll-4, 0)),
		Maxerror: maxError.Microseconds(),
		Esterror: jitter.Microseconds(),
	})
}

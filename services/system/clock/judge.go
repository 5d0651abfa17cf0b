package clock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/reason"
)

// Why a time isn't believed.
const (
	// Impossible: it is over, or the cluster is.
	Impossible reason.Code = "TimeImpossible"
	// Unconfirmed: it is far away, and one server alone says so.
	Unconfirmed reason.Code = "TimeUnconfirmed"
)

// judge decides whether servers may move the clock so far:
//
//	to before the floor                  never
//	to after the end of the authorities  never
//	by less than a day                   yes
//	by more, and two servers agree       yes
//	by more, and the machine is new      yes, once: nothing depends on its date yet
//	by more                              no
//
// Moves of one server add up, until two confirm the time. The operator may do more (see Set).
func (s *syncer) judge(best sample) error {
	if best.offset.Abs() < stepThreshold {
		return nil
	}
	to := s.o.kernel.Now().Add(best.offset)
	moved := to.Sub(s.sure.Add(time.Since(s.since)))
	code, err := Impossible, s.impossible(to)
	switch {
	case err != nil:
	case to.Before(s.floor):
		err = fmt.Errorf("it was %s already; only `gbctl time set` sets the clock to before that", stamp(s.floor))
	case moved.Abs() > farOff && best.voices < 2 && !s.fresh:
		code, err = Unconfirmed, fmt.Errorf("here it is %s; one server alone doesn't move the clock so far: two of machine.time.servers that agree do, or `gbctl time set`", stamp(s.o.kernel.Now()))
	default:
		return nil
	}
	return reason.With(code, fmt.Errorf("by %s it is %s: %w", best.addr, stamp(to), err))
}

// impossible is why it can't be that time.
func (d *Daemon) impossible(to time.Time) error {
	floor, why, _, last := d.earliest()
	if to.Before(floor) {
		return fmt.Errorf("it is %s at least: %s", stamp(floor), why)
	}
	if !last.IsZero() && to.After(last) && d.floor.Before(last) {
		return fmt.Errorf("the configuration's authorities are valid until %s", stamp(last))
	}
	return nil
}

// order is the operator's.
type order struct {
	to   time.Time
	done chan error
}

// orderTimeout is more than the daemon ever works without looking up: it saves a file.
const orderTimeout = 5 * time.Second

// Set sets the clock by order of the operator, whatever servers say.
func (d *Daemon) Set(ctx context.Context, to time.Time) error {
	if d.o.Mode == boot.Container {
		return errors.New("the clock is the host's: set it there")
	}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	o := order{to, make(chan error, 1)}
	for orders := d.orders; ; orders = nil {
		select {
		case orders <- o:
		case err := <-o.done:
			return err
		case <-ctx.Done():
			return fmt.Errorf("service %q doesn't answer", ID)
		}
	}
}

// obey sets the clock, and with it the floor. The operator's watch may be a little ahead of
// the servers, which put that right.
func (s *syncer) obey(to time.Time) error {
	if err := s.impossible(to); err != nil {
		return fmt.Errorf("set the clock to %s: %w", stamp(to), err)
	}
	now := s.o.kernel.Now()
	if err := s.o.kernel.Set(to); err != nil {
		return err
	}
	s.log.Warn(fmt.Sprintf("clock set from %s to %s by the operator", stamp(now), stamp(to)))
	s.d, s.fails, s.lastErr = discipline{}, 0, nil
	s.sure, s.since, s.floor = to, time.Now(), to.Add(-saveEvery)
	s.fresh, s.raised, s.doubt = false, false, false
	s.status = Status{Source: SourceNone, Message: "the operator has set the clock"}
	s.save()
	s.raised = true // from now on, it is saved as it goes on
	// With a status, the kernel also writes the hardware clock.
	return slew(s.o.kernel, 0, time.Second, minJitter, minPoll, 0)
}

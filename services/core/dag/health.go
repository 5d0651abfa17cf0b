package dag

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// DefaultHealthPeriod detects an unhealthy service within HealthFailures
	// periods, at no real cost.
	DefaultHealthPeriod = 5 * time.Second
	// DefaultHealthTimeout is for one request on the same machine.
	DefaultHealthTimeout = 5 * time.Second
	// HealthFailures failed checks in a row, over at least one period less, make a
	// service unhealthy: a single one may fail on a busy machine.
	HealthFailures = 3

	// healthFirst is the pause after the first failed check of a run; it doubles up to the
	// period until a check succeeds. It is short because other services may wait for this one.
	healthFirst = 100 * time.Millisecond
	// healthGrace is the time for a check to return after its context has ended.
	healthGrace = time.Second
)

// watchHealth runs checks until the attempt ends. A check that doesn't return
// in time counts as failed, and no other one is started before it has returned.
func (a *attempt) watchHealth() {
	h := *a.r.svc.Health
	h.Period = cmp.Or(h.Period, DefaultHealthPeriod)
	h.Timeout = cmp.Or(h.Timeout, DefaultHealthTimeout)
	var pending chan error
	wasOK := false
	for pause := healthFirst; ; pause *= 2 {
		if pending == nil {
			pending = a.check(h)
		}
		var err error
		select {
		case err = <-pending:
			pending = nil
		case <-time.After(h.Timeout + healthGrace):
			err = fmt.Errorf("no answer within %s", h.Timeout)
		case <-a.ctx.Done():
			return
		}
		a.evaluate(err, h.Period)
		wasOK = wasOK || err == nil
		if wasOK || pause > h.Period {
			pause = h.Period
		}
		if !sleep.For(a.ctx, pause) {
			return
		}
	}
}

// check makes one check, and sends its result to the channel.
func (a *attempt) check(h Health) chan error {
	result := make(chan error, 1)
	a.checks.Go(func() {
		ctx, cancel := context.WithTimeout(a.ctx, h.Timeout)
		defer cancel()
		result <- a.r.guard(func() error { return h.Check(ctx) })
	})
	return result
}

// evaluate updates the service's health with the result of one check. The first
// failure in a row is an event, and so are the change to unhealthy and the recovery.
// Repetitions aren't, because they would displace all other events from the ring; the
// service's status has the error of the last one.
func (a *attempt) evaluate(err error, period time.Duration) {
	r := a.r
	r.g.mu.Lock()
	defer r.g.unlock()
	if r.attempt != a || r.State != Running {
		return
	}
	if err == nil {
		if a.failures > 0 || r.Health != HealthOK {
			r.record(messageHealthy, change{health: HealthOK})
		}
		a.failures = 0
		return
	}
	now, message := time.Now(), messageUnhealthy+err.Error()
	switch a.failures++; {
	case a.failures == 1:
		a.failedAt = now
		r.record(message, change{reason: reason.Of(err)})
	case r.Health != HealthFail && a.failures >= HealthFailures && now.Sub(a.failedAt) >= (HealthFailures-1)*period:
		r.record(message, change{health: HealthFail, reason: reason.Of(err), level: slog.LevelWarn})
	default:
		r.Message, r.Reason = config.Shorten(message, messageSize), reason.Of(err)
	}
}

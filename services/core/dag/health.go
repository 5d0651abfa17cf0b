package dag

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// DefaultHealthPeriod notices a sick service within HealthFailures periods
	// and costs nothing.
	DefaultHealthPeriod = 5 * time.Second
	// DefaultHealthTimeout is for one request on the same machine.
	DefaultHealthTimeout = 5 * time.Second
	// HealthFailures checks failed in a row, over at least one period less, make
	// a service unhealthy: one may fail on a busy machine.
	HealthFailures = 3

	// healthFirst is the pause after the first failed check of a run; it doubles
	// up to the period until one succeeds. Others may wait for this service.
	healthFirst = 100 * time.Millisecond
	// healthGrace is what a check gets, after its context ended, to return.
	healthGrace = time.Second
)

// watchHealth checks until the attempt ends. A check that doesn't return in time
// counts as failed, and no other is started before it has.
func (a *attempt) watchHealth() {
	h := *a.r.svc.Health
	if h.Period == 0 {
		h.Period = DefaultHealthPeriod
	}
	if h.Timeout == 0 {
		h.Timeout = DefaultHealthTimeout
	}
	var pending chan error
	wasOK := false
	for pause := healthFirst; ; pause *= 2 {
		if pending == nil {
			pending = a.check(h)
		}
		late := time.NewTimer(h.Timeout + healthGrace)
		var err error
		select {
		case err = <-pending:
			pending = nil
		case <-late.C:
			err = fmt.Errorf("no answer within %s", h.Timeout)
		case <-a.ctx.Done():
			late.Stop()
			return
		}
		late.Stop()
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

// check makes one check, and says in the channel what came of it.
func (a *attempt) check(h Health) chan error {
	result := make(chan error, 1)
	a.checks.Go(func() {
		ctx, cancel := context.WithTimeout(a.ctx, h.Timeout)
		defer cancel()
		result <- a.r.guard(func() error { return h.Check(ctx) })
	})
	return result
}

// evaluate updates the service's health with the result of one check. The first failure
// in a row is an event, and so are the change to unhealthy and the recovery; repetitions
// aren't, or they would push everything else out of the ring.
func (a *attempt) evaluate(err error, period time.Duration) {
	r := a.r
	r.g.mu.Lock()
	if r.attempt != a || r.state != Running {
		r.g.mu.Unlock()
		return
	}
	log := func() {}
	if err == nil {
		if a.failures > 0 || r.health != HealthOK {
			log = r.record(messageHealthy, change{health: HealthOK})
		}
		a.failures = 0
	} else {
		now := time.Now()
		if a.failures++; a.failures == 1 {
			a.failedAt = now
			log = r.record(messageUnhealthy+err.Error(), change{reason: reason.Of(err)})
		} else if r.health != HealthFail && a.failures >= HealthFailures && now.Sub(a.failedAt) >= (HealthFailures-1)*period {
			log = r.record(messageUnhealthy+err.Error(), change{health: HealthFail, reason: reason.Of(err), level: slog.LevelWarn})
		}
	}
	r.g.mu.Unlock()
	log()
}

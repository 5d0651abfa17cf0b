package dag

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// attempt is one run of a service: Prepare, Run, and the health checks in
// parallel.
type attempt struct {
	r      *runner
	ctx    context.Context // ends when the run has to stop or has ended
	result chan error      // what Prepare or Run returned
	checks sync.WaitGroup  // the health checks' goroutines

	// The graph's mu guards all following fields.
	startedAt time.Time // zero until Handle.Started
	failures  int       // health checks failed in a row
	failedAt  time.Time // when the first of them failed
}

// outcome is how an attempt ended.
type outcome struct {
	err       error
	ran       time.Duration // in state Running
	stopped   bool          // it was asked to
	abandoned bool          // and did not stop within the budget
}

// try makes one attempt and returns when it has ended or was given up.
func (r *runner) try(s *session) outcome {
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.idle))
	defer cancel()
	a := &attempt{r: r, ctx: ctx, result: make(chan error, 1)}
	r.g.mu.Lock()
	r.attempt = a
	r.record(messagePrepare, change{state: Preparing})
	r.g.unlock()
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		a.result <- a.run(&Handle{Log: r.log, attempt: a})
	}()

	var end outcome
	select {
	case end.err = <-a.result:
	case <-s.asked.Done():
		end.stopped = true
	case <-r.mayStop:
		end.stopped = true
	}
	if end.stopped {
		r.report(messageStopping, change{state: Stopping})
		cancel()
		select {
		case end.err = <-a.result:
			if errors.Is(end.err, context.Canceled) {
				end.err = nil
			}
		case <-time.After(r.svc.StopBudget):
			end.abandoned = true
		}
	}
	cancel()
	a.close(&end, returned)
	return end
}

// close ends the rest of the attempt: it reports nothing from now on.
func (a *attempt) close(end *outcome, returned <-chan struct{}) {
	r := a.r
	r.g.mu.Lock()
	r.attempt = nil
	if !a.startedAt.IsZero() {
		end.ran = time.Since(a.startedAt)
	}
	r.g.mu.Unlock()
	if !end.abandoned {
		budget := r.svc.StopBudget
		if sleep.Group(&a.checks, budget) {
			return
		}
		r.report(fmt.Sprintf("Given up: a health check did not return within %s", budget), change{level: slog.LevelError})
	}
	former := make(chan struct{})
	r.g.mu.Lock()
	before := r.former
	r.former = former
	r.g.mu.Unlock()
	go func() {
		defer close(former)
		<-returned
		a.checks.Wait()
		if before != nil {
			<-before
		}
	}()
}

func (a *attempt) run(h *Handle) error {
	r := a.r
	_ = r.g.Lacks(a.ctx, r.svc.ID) // it is in the status, and Prepare does without
	if r.svc.Prepare != nil {
		if err := r.guard(func() error { return r.svc.Prepare(a.ctx, h) }); err != nil {
			return err
		}
	}
	if a.ctx.Err() != nil {
		return a.ctx.Err()
	}
	if !a.record(messageRun, change{state: Starting}) {
		return context.Canceled
	}
	return r.guard(func() error { return r.svc.Run(a.ctx, h) })
}

// record records a step of this attempt, unless the attempt is over or stopping.
func (a *attempt) record(message string, c change) bool {
	a.r.g.mu.Lock()
	defer a.r.g.unlock()
	if a.r.attempt != a || a.r.State == Stopping {
		return false
	}
	a.r.record(message, c)
	return true
}

func (a *attempt) started(message string) {
	r := a.r
	r.g.mu.Lock()
	defer r.g.unlock()
	switch {
	case r.attempt != a || r.State == Stopping:
	case r.State != Starting:
		r.record(message, change{})
	default:
		a.startedAt = time.Now()
		r.record(message, change{state: Running})
		if r.svc.Health != nil {
			a.checks.Go(a.watchHealth)
		}
	}
}

// guard is Guard for a function of the service.
func (r *runner) guard(f func() error) error { return Guard(r.log, f) }

// Guard calls a function and turns a panic, or the end of its goroutine, into
// an error; the stack goes to the log. It doesn't cover goroutines that the
// function starts. Those that process input from outside need a Guard of their
// own, because a panic in any goroutine of PID 1 ends the machine.
func Guard(log *slog.Logger, f func() error) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		failed := errors.New("it ended its goroutine (runtime.Goexit)") // unless it returns or panics
		defer func() {
			p := recover()
			if p != nil {
				failed = fmt.Errorf("panic: %v", p)
			}
			if wrong, is := p.(error); is {
				failed = fmt.Errorf("panic: %w", wrong)
			}
			if failed != nil {
				err = failed
				log.Error(err.Error(), "stack", string(debug.Stack()))
			}
		}()
		err = f()
		failed = nil
	}()
	<-done
	return err
}

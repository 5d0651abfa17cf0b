package dag

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// Messages of events. They are for people, and scripts look for them, too.
const (
	messageWaiting   = "Waiting for " // the text of a condition follows
	messagePrepare   = "Running pre state"
	messageRun       = "Creating service runner"
	messageHealthy   = "Health check successful"
	messageUnhealthy = "Health check failed: " // the error follows
	messageStopping  = "Stopping"
	messageStopped   = "Stopped"
	messageFinished  = "Finished"
)

// waitRetry is the pause before the next Wait of a condition whose Wait has
// returned an error of its own.
const waitRetry = time.Second

// runner is the graph's state of a service. One goroutine, supervise, changes
// it; Handle.Started and health checks report to it.
type runner struct {
	g          *Graph
	svc        Service
	log        *slog.Logger
	eventLog   *slog.Logger
	needs      []*runner
	dependants []*runner

	sessions chan *session // to supervise; at most the current one
	mayStop  chan struct{} // closed at shutdown after all dependants have ended
	ended    chan struct{} // closed when supervise has returned

	// The graph's mu guards all following fields.
	lifetime  context.Context // Run's
	session   *session        // nil while the service is at rest
	again     bool            // a start was requested while its session stops
	attempt   *attempt        // the current run, nil between runs
	former    <-chan struct{} // closed when a run that was given up has ended
	Status                    // without Up
	lacks     string          // what a restart waits for
	succeeded bool            // ended by itself, without error
	upChanged chan struct{}   // closed and replaced when up() changes
}

// session is the time from a start, by Run or an operator, until the service is
// at rest: it includes all restarts.
type session struct {
	idle   context.Context // ends at shutdown or at a stop request
	asked  context.Context // ends when an operator has asked to stop
	stop   context.CancelFunc
	kick   chan struct{} // ends a pause early
	closed chan struct{} // closed at the session's end
}

func newRunner(g *Graph, svc Service) *runner {
	svc.StopBudget = cmp.Or(svc.StopBudget, DefaultStopBudget)
	svc.Kind = cmp.Or(svc.Kind, Goroutine)
	dependsOn := slices.Clone(svc.DependsOn)
	slices.Sort(dependsOn)
	return &runner{
		g:         g,
		svc:       svc,
		log:       g.opts.Log(svc.ID),
		eventLog:  g.opts.EventLog(svc.ID),
		sessions:  make(chan *session, 1),
		mayStop:   make(chan struct{}),
		ended:     make(chan struct{}),
		Status:    Status{ID: svc.ID, Kind: svc.Kind, DependsOn: slices.Compact(dependsOn), State: Initialized, Health: HealthUnknown},
		upChanged: make(chan struct{}),
	}
}

// up is the only definition of "up", for dependants and for users: the service
// runs and, if it has a health check, is healthy. A skipped service is up,
// because there is nothing to wait for, and so is a task (RestartNever,
// RestartOnError) that has finished without error. The caller holds mu.
func (r *runner) up() bool {
	switch r.State {
	case Running:
		return r.svc.Health == nil || r.Health == HealthOK
	case Skipped:
		return true
	case Finished:
		return r.succeeded && r.svc.Restart != RestartAlways
	}
	return false
}

// change is what an event changes beside the message. Zero values change nothing.
type change struct {
	state   State
	health  HealthState
	reason  reason.Code
	waiting string
	level   slog.Level
}

// record records a step: new state, event, wake-up of waiters, line of the log. The caller holds mu, and calls unlock.
func (r *runner) record(message string, c change) {
	wasUp := r.up()
	now := r.g.opts.SinceBoot()
	if c.state != "" && c.state != r.State {
		r.State, r.Since, r.Health = c.state, now, HealthUnknown
	}
	r.Health = cmp.Or(c.health, r.Health)
	r.Message, r.Reason, r.Waiting = config.Shorten(message, messageSize), c.reason, c.waiting
	up := r.up()
	if up != wasUp {
		close(r.upChanged)
		r.upChanged = make(chan struct{})
	}
	e := Event{Service: r.svc.ID, State: r.State, Health: r.Health, Up: up, Message: r.Message, Reason: r.Reason, SinceBoot: now, Time: r.g.opts.Now()}
	if r.State == Waiting || r.State == Preparing {
		e.After = r.DependsOn
	}
	r.g.history.add(e)
	r.g.unsaid = append(r.g.unsaid, func() { r.eventLog.Log(context.Background(), c.level, e.Message, "state", string(e.State)) })
}

// report is record and the log, for callers that don't hold mu.
func (r *runner) report(message string, c change) {
	r.g.mu.Lock()
	defer r.g.unlock()
	r.record(message, c)
}

func (r *runner) status() Status {
	now := r.Status
	now.Waiting, now.Up = cmp.Or(r.Waiting, r.lacks), r.up()
	return now
}

// open begins a session. The caller holds mu and has seen that there is none.
func (r *runner) open(lifetime context.Context) {
	s := &session{kick: make(chan struct{}, 1), closed: make(chan struct{})}
	s.asked, s.stop = context.WithCancel(context.WithoutCancel(lifetime))
	idle, cancel := context.WithCancel(lifetime)
	context.AfterFunc(s.asked, cancel)
	s.idle = idle
	r.lifetime, r.session, r.again, r.succeeded = lifetime, s, false, false
	r.sessions <- s
}

// start implements Graph.Start. The caller holds mu.
func (r *runner) start() {
	switch {
	case r.session == nil:
		r.open(r.lifetime)
	case r.session.asked.Err() != nil:
		r.again = true
	default:
		sleep.Wake(r.session.kick)
	}
}

// supervise is the runner's goroutine: it serves sessions until the graph stops
// and all dependants have ended.
func (r *runner) supervise(ctx context.Context) {
	defer close(r.ended)
	released := make(chan struct{})
	go func() {
		defer close(released)
		<-ctx.Done()
		for _, d := range r.dependants {
			<-d.ended
		}
		close(r.mayStop)
	}()
	for rest := false; !rest; {
		select {
		case s := <-r.sessions:
			r.serve(s)
			r.g.mu.Lock()
			r.session = nil
			if r.again && ctx.Err() == nil {
				r.open(r.lifetime)
			}
			r.g.mu.Unlock()
			s.stop()
			close(s.closed)
		case <-ctx.Done():
			// No session is opened any more, but one may have been opened just before.
			r.g.mu.Lock()
			rest = len(r.sessions) == 0
			r.g.mu.Unlock()
		}
	}
	<-released
}

// serve runs the service from its needs until it is at rest.
func (r *runner) serve(s *session) {
	if !r.await(s.idle) {
		r.report(messageStopped, change{state: Finished})
		return
	}
	if why, err := r.skip(); err != nil {
		r.report(err.Error(), change{state: Failed, reason: reason.Of(err), level: slog.LevelError})
		return
	} else if why != "" {
		r.report(why, change{state: Skipped})
		return
	}
	last := time.Duration(0) // pause
	for {
		end := r.try(s)
		switch {
		case end.stopped:
			r.reportStopped(end)
			return
		case end.err == nil && r.svc.Restart != RestartAlways:
			r.g.mu.Lock()
			defer r.g.unlock()
			r.succeeded = true
			r.record(messageFinished, change{state: Finished})
			return
		case r.svc.Restart == RestartNever:
			r.report("Failed: "+end.err.Error(), change{state: Failed, reason: reason.Of(end.err), level: slog.LevelError})
			return
		}
		if !r.pause(s, &last, end) {
			r.report(messageStopped, change{state: Finished})
			return
		}
	}
}

func (r *runner) reportStopped(end outcome) {
	switch {
	case end.abandoned:
		r.report(fmt.Sprintf("Given up: it did not stop within %s", r.svc.StopBudget), change{state: Failed, level: slog.LevelError})
	case end.err != nil:
		r.report(fmt.Sprintf("%s (%v)", messageStopped, end.err), change{state: Finished})
	default:
		r.report(messageStopped, change{state: Finished})
	}
}

// pause waits for the time before a restart; false: stop instead.
func (r *runner) pause(s *session, last *time.Duration, end outcome) bool {
	if end.ran >= RestartReset {
		*last = 0
	}
	pause := sleep.Longer(*last, RestartFirst, RestartMax)
	*last = pause
	cause := "it ended without an error"
	if end.err != nil {
		cause = end.err.Error()
	}
	message := fmt.Sprintf("Failed: %s; next try in %s", cause, pause)
	at := r.g.opts.Now().Add(pause).UTC().Format(time.TimeOnly)
	select {
	case <-s.kick: // requested while it still ran
	default:
	}
	r.report(message, change{state: Failed, reason: reason.Of(end.err), level: slog.LevelWarn, waiting: fmt.Sprintf("the next try at %s UTC", at)})
	select {
	case <-time.After(pause):
	case <-s.kick:
		*last = 0
	case <-s.idle.Done():
		return false
	}
	r.g.mu.Lock()
	r.Restarts++
	r.g.mu.Unlock()
	return true
}

func (r *runner) skip() (why string, err error) {
	if r.svc.Skip == nil {
		return "", nil
	}
	err = r.guard(func() error {
		why = r.svc.Skip()
		return nil
	})
	return why, err
}

// abandoned reports whether a run that was given up still exists.
func (r *runner) abandoned() bool {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	return r.former != nil && !sleep.Closed(r.former)
}

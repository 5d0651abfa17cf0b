// Package dag runs the services of a node in the order of their needs.
//
// A service is a value that says what it waits for, how it runs, how one sees
// that it is healthy, and what happens when it ends. The graph starts each one
// as soon as its conditions hold, restarts it by policy, stops all in reverse
// order, and tells every transition as an event. It knows no service by name.
//
//	Initialized → Waiting → Preparing → Starting → Running → Stopping → Finished
//	                 ↑__________________ restart ______|              ↘ Failed
//	                                                                  ↘ Skipped
package dag

import (
	"context"
	"log/slog"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// State is where a service stands. The names are what users read.
type State string

const (
	Initialized State = "Initialized" // known, not asked to run yet
	Waiting     State = "Waiting"     // for its conditions
	Preparing   State = "Preparing"   // conditions hold, Prepare runs (image pull, directories)
	Starting    State = "Starting"    // Run was called and has not said Started yet
	Running     State = "Running"     // Run has called Handle.Started
	Stopping    State = "Stopping"    // was asked to end, within its stop budget
	Finished    State = "Finished"    // ended without error and isn't restarted
	Failed      State = "Failed"      // ended with an error; a restart may follow
	Skipped     State = "Skipped"     // not for this machine (Service.Skip said why)
)

// Condition is something that a service waits for. String is what the user
// reads, verbatim, while it doesn't hold: `service "containerd" to be "up"`,
// `file "/etc/x" to exist`; it may shrink as parts come true.
type Condition interface {
	// Wait returns nil once the condition holds, or ctx's error.
	Wait(ctx context.Context) error
	String() string
}

// RestartPolicy says what follows when Run returns.
type RestartPolicy int

const (
	RestartAlways  RestartPolicy = iota // a daemon: whatever it returned
	RestartOnError                      // until it succeeds
	RestartNever                        // a task that runs once
)

// Kind says how a service runs, in the words that users read.
type Kind string

const (
	Goroutine Kind = "goroutine of PID 1"
	Process   Kind = "process"
	Container Kind = "container"
)

// Health is how one sees that a running service works. The first check comes at
// once, further ones in quick steps until one succeeds, then one per Period;
// they never overlap. A service whose check has failed HealthFailures times in a
// row, over at least HealthFailures-1 periods, is unhealthy, and no longer up.
// It isn't restarted for that: only its own end is.
type Health struct {
	Check   func(ctx context.Context) error
	Period  time.Duration // between checks; 0: DefaultHealthPeriod
	Timeout time.Duration // of one check; 0: DefaultHealthTimeout
}

// Service is one node of the graph. It is a value: the graph keeps its own
// state beside it.
type Service struct {
	ID        string
	Kind      Kind        // "" is Goroutine
	DependsOn []string    // IDs that must be up; cycles and unknown IDs fail in New
	Needs     []Condition // anything else to wait for
	// Skip, asked once its needs hold, says why this service is not for this
	// machine; nil or "" runs it. A skipped service counts as up for those that
	// depend on it. Optional.
	Skip func() string
	// Prepare runs before each start, in state Preparing. Optional.
	Prepare func(ctx context.Context, h *Handle) error
	// Run is the service: it blocks until the service has ended, or until ctx is
	// cancelled and it has stopped. It calls h.Started once it is running, and
	// isn't up before; a task that others wait for to be done doesn't call it:
	// it is up when it has finished.
	Run     func(ctx context.Context, h *Handle) error
	Health  *Health
	Restart RestartPolicy
	// StopBudget is how long Run may take to return after its context was
	// cancelled; 0: DefaultStopBudget. After it the graph goes on without it.
	StopBudget time.Duration
}

// Handle is what a service's functions get to talk to the graph. It belongs to
// one run: what is said through the handle of an earlier one is dropped.
type Handle struct {
	// Log writes to the service's own log and, from level warn, to the console.
	Log     *slog.Logger
	attempt *attempt
}

// Started says that the service runs, in words for its users: `Started task
// kubelet (PID 2334) for container kubelet`. Its health checks begin now. Only
// Run calls it; a further call, after the process was replaced, is an event.
func (h *Handle) Started(message string) { h.attempt.started(message) }

// Event adds a line to the story of the service without changing its state.
func (h *Handle) Event(message string) { h.attempt.record(message, change{}) }

// EventOf is an Event that programs understand, too: by its code.
func (h *Handle) EventOf(code reason.Code, message string) {
	h.attempt.record(message, change{reason: code})
}

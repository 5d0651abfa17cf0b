// Package dag runs the services of a node in the order of their needs.
//
// A service is a value: its conditions, its function to run, its health check,
// and its restart policy. The graph starts each service as soon as its
// conditions hold, restarts it by policy, stops all in reverse order, and
// reports every transition as an event. It knows no service by name.
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

// State is the state of a service. Users read the names.
type State string

const (
	Initialized State = "Initialized" // known, not asked to run yet
	Waiting     State = "Waiting"     // for its conditions
	Preparing   State = "Preparing"   // conditions hold, Prepare runs (image pull, directories)
	Starting    State = "Starting"    // Run was called and has not called Started yet
	Running     State = "Running"     // Run has called Handle.Started
	Stopping    State = "Stopping"    // was asked to end, within its stop budget
	Finished    State = "Finished"    // ended without error and isn't restarted
	Failed      State = "Failed"      // ended with an error; a restart may follow
	Skipped     State = "Skipped"     // not for this machine (by Service.Skip)
)

// Condition is something that a service waits for. While it doesn't hold, users
// read its String verbatim: `service "containerd" to be "up"`, `file "/etc/x"
// to exist`; it may become shorter as parts hold.
type Condition interface {
	// Wait returns nil once the condition holds, or ctx's error.
	Wait(ctx context.Context) error
	String() string
}

// RestartPolicy is what happens after Run has returned.
type RestartPolicy int

const (
	RestartAlways  RestartPolicy = iota // a daemon: after any result
	RestartOnError                      // until it succeeds
	RestartNever                        // a task that runs once
)

// Kind is how a service runs, in the words for users.
type Kind string

const (
	Goroutine Kind = "goroutine of PID 1"
	Process   Kind = "process"
	Container Kind = "container"
)

// Health is the health check of a running service. The first check is made at
// once, further ones at short intervals until one succeeds, then one per
// Period; they never overlap. A service whose check has failed HealthFailures
// times in a row, over at least HealthFailures-1 periods, is unhealthy, and no
// longer up. It isn't restarted for that: only its end causes a restart.
type Health struct {
	Check   func(ctx context.Context) error
	Period  time.Duration // between checks; 0: DefaultHealthPeriod
	Timeout time.Duration // of one check; 0: DefaultHealthTimeout
}

// Service is one node of the graph. It is a value: the graph stores its state
// elsewhere.
type Service struct {
	ID        string
	Kind      Kind        // "" is Goroutine
	DependsOn []string    // IDs that must be up; cycles and unknown IDs fail in New
	Needs     []Condition // anything else to wait for
	// Skip, called after its needs hold, returns why this service is not for this
	// machine; with nil or "" the service runs. A skipped service counts as up for
	// those that depend on it. Optional.
	Skip func() string
	// Lacks says what the next run would lack that the present, or the last one has had: a restart would end what
	// runs for nothing. It returns soon, and is called again until it is nil. Optional.
	Lacks func(ctx context.Context) error
	// Prepare runs before each start, in state Preparing. Optional.
	Prepare func(ctx context.Context, h *Handle) error
	// Run is the service: it blocks until the service has ended, or until ctx is
	// cancelled and it has stopped. It calls h.Started when it is running, and
	// isn't up before. A task whose end others wait for doesn't call it: it is up
	// when it has finished.
	Run     func(ctx context.Context, h *Handle) error
	Health  *Health
	Restart RestartPolicy
	// StopBudget is how long Run may take to return after its context was
	// cancelled; 0: DefaultStopBudget. After that, the graph continues without it.
	StopBudget time.Duration
}

// Handle is the graph's interface for a service's functions. It belongs to one
// run: calls on the handle of an earlier one are ignored.
type Handle struct {
	// Log writes to the service's own log and, from level warn, to the console.
	Log     *slog.Logger
	attempt *attempt
}

// Started reports that the service runs, in words for its users: `Started task
// kubelet (PID 2334) for container kubelet`. Its health checks begin now. Only
// Run calls it; a further call, after the process was replaced, is an event.
func (h *Handle) Started(message string) { h.attempt.started(message) }

// Event adds a message to the service's events without a change of its state.
func (h *Handle) Event(message string) { h.attempt.record(message, change{}) }

// EventOf is an Event with a code for programs.
func (h *Handle) EventOf(code reason.Code, message string) {
	h.attempt.record(message, change{reason: code})
}

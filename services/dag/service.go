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

// Health is how one sees that a running service works.
type Health struct {
	Check   func(ctx context.Context) error
	Period  time.Duration // between checks; 0: DefaultHealthPeriod
	Timeout time.Duration // of one check; 0: DefaultHealthTimeout
}

// Service is one node of the graph. It is a value: the graph keeps its own
// state beside it.
type Service struct {
	ID        string
	DependsOn []string    // IDs that must be up; cycles and unknown IDs fail in New
	Needs     []Condition // anything else to wait for
	// Skip says why this service is not for this machine; "" runs it. A skipped
	// service counts as up for those that depend on it.
	Skip string
	// Prepare runs before each start, in state Preparing. Optional.
	Prepare func(ctx context.Context, h *Handle) error
	// Run is the service: it blocks until the service has ended, or until ctx is
	// cancelled and it has stopped. It calls h.Started once it is running.
	Run     func(ctx context.Context, h *Handle) error
	Health  *Health
	Restart RestartPolicy
	// StopBudget is how long Run may take to return after its context was
	// cancelled; 0: DefaultStopBudget. After it the graph goes on without it.
	StopBudget time.Duration
}

// Handle is what a service's functions get to talk to the graph.
type Handle struct {
	// Log writes to the service's own log and, from level warn, to the console.
	Log *slog.Logger
	svc *runner
}

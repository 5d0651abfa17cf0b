package dag

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/reason"
)

// ErrNotRunning is returned by Start, Stop and Restart before Run and after the
// graph has begun to stop: no service is started then.
var ErrNotRunning = errors.New("the services are not running")

// DefaultStopBudget is for daemons that end on SIGTERM: more than enough for
// them, and short for the shutdown of a machine.
const DefaultStopBudget = 10 * time.Second

// Options are the graph's inputs from the node. All may be nil.
type Options struct {
	Log       func(id string) *slog.Logger // the log of a service
	EventLog  func(id string) *slog.Logger // of its events; default Log
	SinceBoot func() time.Duration         // CLOCK_BOOTTIME
	Now       func() time.Time
}

// Status is the current state of a service.
type Status struct {
	ID        string
	Kind      Kind
	DependsOn []string // sorted
	State     State
	Health    HealthState
	Message   string        // of the last event
	Reason    reason.Code   // of the last event
	Waiting   string        // for what, while it waits, or its restart does
	Lacks     reason.Code   // why its restart waits
	Since     time.Duration // since boot: when this state began
	Restarts  int
	Up        bool
}

// Graph runs services. Make one with New.
type Graph struct {
	opts    Options
	runners map[string]*runner
	order   []*runner // as given to New

	// mu guards all following fields and the state in each runner. It is one lock,
	// so that events have one order and a service one state.
	mu      sync.Mutex
	ran     bool
	history history
	unsaid  []func() // logs the last steps, see unlock
}

// unlock releases mu, and logs the steps that were recorded meanwhile: nobody waits for a log.
func (g *Graph) unlock() {
	unsaid := g.unsaid
	g.unsaid = nil
	g.mu.Unlock()
	for _, log := range unsaid {
		log()
	}
}

// New makes a graph. Duplicate and unknown IDs, and dependency cycles, are
// errors that name them.
func New(opts Options, services ...Service) (*Graph, error) {
	option.Default(&opts.Log, func(string) *slog.Logger { return slog.New(slog.DiscardHandler) })
	option.Default(&opts.EventLog, opts.Log)
	option.Default(&opts.SinceBoot, SinceBoot)
	option.Default(&opts.Now, time.Now)
	g := &Graph{opts: opts, runners: make(map[string]*runner, len(services))}
	g.history.subs = make(map[chan Event]struct{})
	return g, g.connect(services)
}

// SinceBoot is the time since the kernel started: CLOCK_BOOTTIME, which counts
// from the kernel's start and is never set (clock_gettime(2)).
func SinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// Run starts all services, each as soon as its needs hold, and restarts them
// until ctx is cancelled. Then no service is started any more, and each one is
// stopped after all services that depend on it have ended, within its
// StopBudget. Run returns when all have ended or were given up; the latter is
// an error that lists them. A graph runs once.
func (g *Graph) Run(ctx context.Context) error {
	g.mu.Lock()
	if g.ran {
		g.mu.Unlock()
		return errors.New("run services: they ran before")
	}
	g.ran = true
	for _, r := range g.order {
		r.open(ctx)
	}
	g.mu.Unlock()

	var wg sync.WaitGroup
	for _, r := range g.order {
		wg.Go(func() { r.supervise(ctx) })
	}
	wg.Wait()

	var left []string
	for _, r := range g.order {
		if r.abandoned() {
			left = append(left, r.svc.ID)
		}
	}
	if len(left) > 0 {
		slices.Sort(left)
		return fmt.Errorf("stop services: given up after their budget: %s", strings.Join(left, ", "))
	}
	return nil
}

// Status returns the state of service id; false if there is none.
func (g *Graph) Status(id string) (Status, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.runners[id]
	if r == nil {
		return Status{}, false
	}
	return r.status(), true
}

// Statuses returns the state of each service, sorted by ID.
func (g *Graph) Statuses() []Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := lists.Of(g.order, (*runner).status)
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Start starts a service that has ended or was stopped, and returns at once. A
// service that is still stopping starts again after that. A pause before a
// restart ends. A running service isn't changed.
func (g *Graph) Start(_ context.Context, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	r, err := g.find("start", id)
	if err != nil {
		return err
	}
	r.start()
	return nil
}

// Stop stops a service and returns when it has ended or was given up after its
// budget. Services that depend on it continue. It stays stopped until Start.
func (g *Graph) Stop(ctx context.Context, id string) error {
	return g.stop(ctx, "stop", id, func(*runner) {})
}

// Lacks is an error for as long as a restart of a service has to wait (Service.Lacks). Its status says so, too.
func (g *Graph) Lacks(ctx context.Context, id string) error {
	g.mu.Lock()
	r, err := g.find("restart", id)
	g.mu.Unlock()
	if err != nil || r.svc.Lacks == nil {
		return err
	}
	text := ""
	if err = r.guard(func() error { return r.svc.Lacks(ctx) }); err != nil {
		text = config.Shorten(err.Error(), messageSize)
	}
	g.mu.Lock()
	defer g.unlock()
	if text != "" && text != r.lacks && r.attempt != nil {
		r.record(text, change{reason: reason.Of(err)})
	}
	r.lacks, r.Lacks = text, reason.Of(err)
	return err
}

// Restart is Stop, then Start. It also starts the service if ctx ends before it has stopped. A service that would lack
// something afterwards goes on.
func (g *Graph) Restart(ctx context.Context, id string) error {
	if err := g.Lacks(ctx, id); err != nil {
		return fmt.Errorf("restart service %q: %w", id, err)
	}
	return g.stop(ctx, "restart", id, (*runner).start)
}

// stop asks a service to stop, calls then, and waits until the service is at rest.
func (g *Graph) stop(ctx context.Context, verb, id string, then func(*runner)) error {
	g.mu.Lock()
	r, err := g.find(verb, id)
	if err != nil {
		g.mu.Unlock()
		return err
	}
	s := r.session
	if s != nil {
		s.stop()
	}
	r.again = false
	then(r)
	g.mu.Unlock()
	if s == nil {
		return nil
	}
	select {
	case <-s.closed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s service %q: it is still stopping: %w", verb, id, ctx.Err())
	}
}

// find looks up a service for a change. The caller holds mu.
func (g *Graph) find(verb, id string) (*runner, error) {
	r := g.runners[id]
	if r == nil {
		return nil, fmt.Errorf("%s service %q: no such service", verb, id)
	}
	if r.lifetime == nil || r.lifetime.Err() != nil {
		return nil, fmt.Errorf("%s service %q: %w", verb, id, ErrNotRunning)
	}
	return r, nil
}

package resource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// retryFirst is the pause after a first failure, and the least one between a
	// failure and the next try: a failing controller whose inputs change all the
	// time must not spin.
	retryFirst = 500 * time.Millisecond
	// retryMax is what the pause doubles up to. A change of the inputs ends it
	// early, so this is for causes outside the store.
	retryMax = 30 * time.Second
	// retryJitter spreads the pauses by up to this part: controllers that fail
	// for one cause needn't all come back at once.
	retryJitter = 0.2
	// leisure is the pause of a leisurely controller after a change.
	leisure = 100 * time.Millisecond
)

// Input is a type that a controller reads, and whose changes wake it.
type Input struct {
	Type string
	ID   string // "" is all
	// Quiet: its changes wake nobody, because another input follows from it, and changes with it.
	Quiet bool
}

// Controller makes some facts true.
type Controller struct {
	Name    string // k8s.KubeletStaticPodController
	Inputs  []Input
	Outputs []string // types; no other controller writes them
	// Leisurely: nobody waits for what it does, so that others have the processors first after a change.
	Leisurely bool
	// Reconcile is called once at the start and then whenever an input has changed since
	// the last call began; several changes may be one call, so it looks at all of its
	// inputs anew. Calls never overlap. again > 0 asks for a call after that time even
	// without a change. An error is logged, and the call is made again with a growing
	// pause; so is a panic.
	Reconcile func(ctx context.Context, v View) (again time.Duration, err error)
}

// Failure is the last error of a controller that fails. One that works has none.
type Failure struct {
	Since  time.Time   `yaml:"since" column:"SINCE"` // of the first failure in a row
	Reason reason.Code `yaml:"reason,omitempty" column:"REASON"`
	Error  string      `yaml:"error" column:"ERROR"`
}

// Failures are published by the runtime, by the controller's name.
var Failures = Define[Failure](Definition{
	Type: "ControllerFailures.runtime.garboard.dev", Kind: "ControllerFailure", Namespace: "runtime",
})

// RetryIn is err, for a Reconcile that knows better than the growing pause when to
// try again. A change of the inputs is a call at once, as after a success.
func RetryIn(err error, after time.Duration) error { return retryIn{err, after} }

type retryIn struct {
	error
	after time.Duration
}

func (r retryIn) Unwrap() error { return r.error }

// Runtime runs controllers.
type Runtime struct {
	store       *Store
	log         *slog.Logger
	controllers []Controller // sorted by name
	calls       []counters   // of the controllers
}

// counters are those of one controller's calls.
type counters struct{ calls, failures, nanoseconds atomic.Uint64 }

// Calls are how often a controller was called since the start of the node.
type Calls struct {
	Controller      string
	Calls, Failures uint64
	Time            time.Duration // of all calls together
}

// Calls returns those of each controller, sorted by name.
func (rt *Runtime) Calls() []Calls {
	all := make([]Calls, len(rt.controllers))
	for i, c := range rt.controllers {
		n := &rt.calls[i]
		all[i] = Calls{c.Name, n.calls.Load(), n.failures.Load(), time.Duration(n.nanoseconds.Load())}
	}
	return all
}

// NewRuntime checks the controllers and returns their runtime. Two of one name,
// two that write one type, and types that nobody has defined are errors.
func NewRuntime(store *Store, log *slog.Logger, controllers ...Controller) (*Runtime, error) {
	rt := &Runtime{store: store, log: log, controllers: slices.Clone(controllers)}
	slices.SortStableFunc(rt.controllers, func(a, b Controller) int { return strings.Compare(a.Name, b.Name) })
	var problems []error
	writers := make(map[string]string)
	for i, c := range rt.controllers {
		if i > 0 && rt.controllers[i-1].Name == c.Name {
			problems = append(problems, fmt.Errorf("controller %s is there twice", c.Name))
			continue
		}
		for _, in := range c.Inputs {
			if !defined(in.Type) {
				problems = append(problems, fmt.Errorf("controller %s reads %s, which is not defined", c.Name, in.Type))
			}
		}
		for _, typ := range c.Outputs {
			if !defined(typ) {
				problems = append(problems, fmt.Errorf("controller %s writes %s, which is not defined", c.Name, typ))
			}
			if other, taken := writers[typ]; taken {
				problems = append(problems, fmt.Errorf("%s has two writers: %s and %s", typ, other, c.Name))
			}
			writers[typ] = c.Name
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	rt.calls = make([]counters, len(rt.controllers))
	return rt, nil
}

// Run runs the controllers until ctx ends and all of them have returned.
func (rt *Runtime) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for i, c := range rt.controllers {
		wg.Go(func() { rt.drive(ctx, c, &rt.calls[i]) })
	}
	wg.Wait()
	return nil
}

// drive runs one controller.
func (rt *Runtime) drive(ctx context.Context, c Controller, n *counters) {
	mark := make(chan struct{}, 1)
	defer rt.store.notify(c.Inputs, mark)()
	v := newView(rt.store, c, rt.log, mark)
	w := rt.store.As(c.Name)
	starting, pause, failure := true, time.Duration(0), Failure{}
	for ctx.Err() == nil {
		if starting {
			v.log.Info("controller starting")
			starting = false
		}
		began := time.Now()
		again, err := reconcile(ctx, c, v)
		n.calls.Add(1)
		n.nanoseconds.Add(uint64(time.Since(began)))
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			n.failures.Add(1)
			// The first failure of a kind is a warning; its repetitions, while the controller
			// waits for something, are only a line in the log.
			level := slog.LevelWarn
			if err.Error() == failure.Error {
				level = slog.LevelInfo
			}
			v.log.Log(ctx, level, fmt.Sprintf("controller failed: %v", err))
			if failure.Since.IsZero() {
				failure.Since = time.Now()
			}
			failure.Reason, failure.Error = reason.Of(err), err.Error()
			rt.note(Failures.Put(w, c.Name, failure))
			starting, pause = true, sleep.Longer(pause, retryFirst, retryMax)
			least := retryFirst
			if own := (retryIn{}); errors.As(err, &own) {
				least, pause = 0, max(own.after, retryFirst)
			}
			if !sleep.For(ctx, least) || !sleep.Until(ctx, mark, jitter(pause)-least) {
				return
			}
			continue
		}
		if failure.Error != "" {
			rt.note(Failures.Delete(w, c.Name))
		}
		pause, failure = 0, Failure{}
		if again <= 0 {
			again = math.MaxInt64 // until a mark
		}
		if !sleep.Until(ctx, mark, again) || c.Leisurely && !sleep.For(ctx, leisure) {
			return
		}
	}
}

// note logs what can't happen: nobody else writes a controller's failure.
func (rt *Runtime) note(err error) {
	if err != nil {
		rt.log.Error(err.Error())
	}
}

func jitter(d time.Duration) time.Duration {
	return d + time.Duration(rand.Float64()*retryJitter*float64(d))
}

// reconcile makes one call and turns a panic into an error, with the stack in
// the log.
func reconcile(ctx context.Context, c Controller, v *view) (again time.Duration, err error) {
	err = dag.Guard(v.log, func() (err error) { again, err = c.Reconcile(ctx, v); return err })
	return again, err
}

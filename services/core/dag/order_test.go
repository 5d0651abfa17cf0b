package dag

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// plan is a synthetic service.
type plan struct {
	needs                []int // indices of earlier plans
	kind                 int
	prepare, start, stop time.Duration
	crashes              int // number of first runs that fail
	deaf                 bool
	healthAfter          time.Duration
}

const (
	plainDaemon = iota
	healthyDaemon
	task
	skippedService
	kinds
)

func name(i int) string { return fmt.Sprintf("s%04d", i) }

// world runs plans and checks invariants.
type world struct {
	plans    []plan
	graph    *Graph
	events   chan Event
	release  chan struct{} // ends services that ignore their context
	mu       sync.Mutex
	problems []string // guarded by mu
}

func (w *world) problem(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, fmt.Sprintf(format, args...))
}

// allEvents is more than any run below has: the graph must not drop any here.
const allEvents = 1 << 17

func newWorld(plans []plan, shuffle *rand.Rand) *world {
	w := &world{plans: plans, events: make(chan Event, allEvents), release: make(chan struct{})}
	var services []Service
	for i := range plans {
		services = append(services, w.service(i))
	}
	shuffle.Shuffle(len(services), func(i, j int) { services[i], services[j] = services[j], services[i] })
	g, err := New(Options{SinceBoot: clock()}, services...)
	if err != nil {
		w.problem("new: %v", err)
		return w
	}
	w.graph = g
	g.history.subs[w.events] = struct{}{}
	return w
}

func (w *world) service(i int) Service {
	p := w.plans[i]
	svc := Service{ID: name(i), StopBudget: 20 * time.Second}
	for _, n := range p.needs {
		svc.DependsOn = append(svc.DependsOn, name(n))
	}
	var inside, runs atomic.Int32
	var readyAt atomic.Int64
	alone := func() func() {
		if inside.Add(1) > 1 {
			w.problem("%s runs twice at once", svc.ID)
		}
		return func() { inside.Add(-1) }
	}
	svc.Prepare = func(ctx context.Context, h *Handle) error {
		defer alone()()
		sleep.For(ctx, p.prepare)
		return ctx.Err()
	}
	svc.Run = func(ctx context.Context, h *Handle) error {
		defer alone()()
		if !sleep.For(ctx, p.start) {
			return ctx.Err()
		}
		if int(runs.Add(1)) <= p.crashes {
			return errors.New("crash")
		}
		if p.kind == task {
			return nil
		}
		readyAt.Store(time.Now().Add(p.healthAfter).UnixNano())
		h.Started("Started " + svc.ID)
		<-ctx.Done()
		if p.deaf {
			<-w.release
			return nil
		}
		<-time.After(p.stop)
		return nil
	}
	switch p.kind {
	case healthyDaemon:
		svc.Health = &Health{Check: func(context.Context) error {
			if time.Now().UnixNano() < readyAt.Load() {
				return errors.New("not yet")
			}
			return nil
		}}
	case task:
		svc.Restart = RestartOnError
	case skippedService:
		svc.Skip = func() string { return "not here" }
	}
	return svc
}

// follows are the states that may come after each one.
var follows = map[State][]State{
	Initialized: {Waiting, Preparing, Skipped, Finished},
	Waiting:     {Waiting, Preparing, Skipped, Finished},
	Preparing:   {Starting, Stopping, Failed},
	Starting:    {Running, Stopping, Failed, Finished},
	Running:     {Running, Stopping, Failed},
	Stopping:    {Finished, Failed},
	Failed:      {Preparing, Waiting, Skipped, Finished},
	Finished:    {Waiting, Preparing, Skipped, Finished},
	Skipped:     {Waiting, Preparing, Skipped, Finished},
}

// check reads the events of a whole run; stopped is the number of the last one
// before the graph's stop.
func (w *world) check(stopped uint64) {
	delete(w.graph.history.subs, w.events)
	close(w.events)
	n := len(w.plans)
	state := make(map[string]State, n)
	wasUp := make(map[string]bool, n)
	began := make(map[string]bool, n)
	stopAt := make(map[string]uint64, n) // of the Stopping event at shutdown
	endAt := make(map[string]uint64, n)  // of the last event
	index := make(map[string]int, n)
	for i := range w.plans {
		index[name(i)] = i
		state[name(i)] = Initialized
	}
	var seq uint64
	for e := range w.events {
		if seq++; e.Seq != seq {
			w.problem("event %d is missing", seq)
			return
		}
		if !slices.Contains(follows[state[e.Service]], e.State) {
			w.problem("%s: %s after %s", e.Service, e.State, state[e.Service])
		}
		state[e.Service] = e.State
		endAt[e.Service] = seq
		if e.State == Preparing && !began[e.Service] {
			began[e.Service] = true
			for _, need := range w.plans[index[e.Service]].needs {
				if !wasUp[name(need)] {
					w.problem("%s began before %s was up", e.Service, name(need))
				}
			}
		}
		wasUp[e.Service] = wasUp[e.Service] || e.Up
		if e.State == Stopping && seq > stopped && stopAt[e.Service] == 0 {
			stopAt[e.Service] = seq
		}
	}
	// Indices are a topological order: from the top, the last end among all
	// services that need this one, also indirectly.
	lastEnd := make([]uint64, n)
	for i := n - 1; i >= 0; i-- {
		id := name(i)
		if at := stopAt[id]; at != 0 && at < lastEnd[i] {
			w.problem("%s was stopped at %d, but one that needs it ended at %d", id, at, lastEnd[i])
		}
		reach := lastEnd[i]
		if endAt[id] > stopped {
			reach = max(reach, endAt[id])
		}
		for _, need := range w.plans[i].needs {
			lastEnd[need] = max(lastEnd[need], reach)
		}
		if s := state[id]; s != Finished && s != Skipped && !(w.plans[i].deaf && s == Failed) {
			w.problem("%s ended as %s", id, s)
		}
	}
}

func (w *world) seq() uint64 {
	w.graph.mu.Lock()
	defer w.graph.mu.Unlock()
	return w.graph.history.seq
}

func randomPlans(r *rand.Rand, n int) []plan {
	ms := func(most int) time.Duration { return time.Duration(r.IntN(most)) * time.Millisecond }
	plans := make([]plan, n)
	for i := range plans {
		p := plan{kind: r.IntN(kinds), prepare: ms(50), start: ms(100), stop: ms(100), healthAfter: ms(2000)}
		for range r.IntN(5) {
			if i > 0 {
				p.needs = append(p.needs, r.IntN(i))
			}
		}
		if r.IntN(20) == 0 {
			p.crashes = 1 + r.IntN(3)
		}
		p.deaf = r.IntN(200) == 0
		plans[i] = p
	}
	return plans
}

func TestThousandServices(t *testing.T) {
	const seed = 20260914
	began := time.Now()
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(seed, seed))
		w := newWorld(randomPlans(random, 1000), random)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.graph.Run(ctx) }()
		pass(10 * time.Minute)
		for _, s := range w.graph.Statuses() {
			if !s.Up {
				t.Errorf("not up: %+v", s)
			}
		}
		chart := NewChart(w.graph.BootEvents())
		if len(chart.Critical) == 0 {
			t.Error("no critical path")
		}
		stopped := w.seq()
		cancel()
		if err := <-done; err == nil {
			t.Error("the deaf were not given up")
		}
		close(w.release)
		w.check(stopped)
		for _, p := range w.problems {
			t.Error(p)
		}
		t.Logf("%d events", w.seq())
	})
	t.Logf("in %s", time.Since(began).Round(time.Millisecond))
}

// Small graphs of every shape, with concurrent operators, stopped at any time.
func TestOrderHoldsForAnyGraph(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		ms := func(label string, most int) time.Duration {
			return time.Duration(rapid.IntRange(0, most).Draw(rt, label)) * time.Millisecond
		}
		plans := make([]plan, rapid.IntRange(1, 9).Draw(rt, "services"))
		for i := range plans {
			plans[i] = plan{
				kind: rapid.IntRange(0, kinds-1).Draw(rt, "kind"), prepare: ms("prepare", 20), start: ms("start", 20), stop: ms("stop", 20),
				crashes: max(0, rapid.IntRange(-3, 2).Draw(rt, "crashes")), healthAfter: ms("health", 300),
				deaf: rapid.IntRange(0, 15).Draw(rt, "deaf") == 15,
			}
			for n := range i {
				if rapid.IntRange(0, 2).Draw(rt, "need") == 2 {
					plans[i].needs = append(plans[i].needs, n)
				}
			}
		}
		type action struct {
			at, service, what int
		}
		actions := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) action {
			return action{rapid.IntRange(0, 500).Draw(rt, "at"), rapid.IntRange(0, len(plans)-1).Draw(rt, "service"), rapid.IntRange(0, 2).Draw(rt, "what")}
		}), 0, 5).Draw(rt, "actions")
		stopAt := ms("stop at", 3000)

		var problems []string
		// Problems leave the bubble before rapid gets them, because rapid panics.
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(plans, rand.New(rand.NewPCG(1, 2)))
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- w.graph.Run(ctx) }()
			var operators sync.WaitGroup
			for _, a := range actions {
				operators.Go(func() {
					<-time.After(time.Duration(a.at) * time.Millisecond)
					f := []func(context.Context, string) error{w.graph.Stop, w.graph.Start, w.graph.Restart}[a.what]
					if err := f(context.Background(), name(a.service)); err != nil && !errors.Is(err, ErrNotRunning) {
						w.problem("operator: %v", err)
					}
				})
			}
			<-time.After(stopAt)
			operatorsWait(&operators, stopAt)
			synctest.Wait()
			stopped := w.seq()
			cancel()
			select {
			case <-done:
			case <-time.After(time.Hour):
				w.problem("run does not return")
			}
			close(w.release)
			operators.Wait()
			w.check(stopped)
			problems = w.problems
		})
		if len(problems) > 0 {
			rt.Fatalf("%q", problems)
		}
	})
}

// operatorsWait waits for operators that began before the stop in half of the
// runs: in the other half the stop comes while they are active.
func operatorsWait(operators *sync.WaitGroup, stopAt time.Duration) {
	if stopAt%(2*time.Millisecond) == 0 {
		operators.Wait()
	}
}

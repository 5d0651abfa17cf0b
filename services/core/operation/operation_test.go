package operation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/google/go-cmp/cmp"
)

// node is what stands for one in tests: what its steps did outlives its boots.
type node struct {
	t           *testing.T
	dir         string
	definitions []Definition
	lock        Lock
	shared      Shared
	full        atomic.Bool   // STATE
	hangs       chan struct{} // STATE doesn't answer until it is closed; nil: it does
	store       *resource.Store

	mu   sync.Mutex // guards did
	did  []string
	stop func() error
	r    *Runner
}

func newNode(t *testing.T, definitions ...Definition) *node {
	return &node{t: t, dir: filepath.Join(t.TempDir(), "operations"), definitions: definitions}
}

// boot starts the node; STATE is there at once.
func (n *node) boot() {
	n.t.Helper()
	n.bootStateless()
	n.r.Open()
	synctest.Wait()
}

// bootStateless starts the node; STATE isn't there yet.
func (n *node) bootStateless() {
	n.t.Helper()
	n.store = resource.NewStore()
	write := func(path string, data []byte, mode os.FileMode) error {
		if n.full.Load() {
			return fmt.Errorf("write %s: %w", path, syscall.ENOSPC)
		}
		if n.hangs != nil {
			<-n.hangs
		}
		return boot.WriteFile(path, data, mode)
	}
	r, err := New(Options{Store: n.store, Definitions: n.definitions, Log: slog.New(slog.DiscardHandler), Dir: n.dir, Lock: n.lock, Shared: n.shared, writeFile: write})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	n.stop = func() error { cancel(); return <-ended }
	n.r = r
}

// halt stops the node, and complains of what doesn't stop.
func (n *node) halt() {
	n.t.Helper()
	if err := n.stop(); err != nil {
		n.t.Error(err)
	}
}

func (n *node) do(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.did = append(n.did, fmt.Sprintf(format, args...))
}

func (n *node) expect(want ...string) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if diff := cmp.Diff(want, n.did); diff != "" {
		n.t.Errorf("what was done (-want +got):\n%s", diff)
	}
}

// start begins an operation.
func (n *node) start(name string) string {
	n.t.Helper()
	o, err := n.r.Start(n.t.Context(), Ask{Name: name, By: "jo"})
	if err != nil {
		n.t.Fatal(err)
	}
	return o.ID
}

// states are that of the operation and those of its steps.
func (n *node) states(id string) (State, []State) {
	n.t.Helper()
	o, err := n.r.Get(id)
	if err != nil {
		n.t.Fatal(err)
	}
	var steps []State
	for _, s := range o.Steps {
		steps = append(steps, s.State)
	}
	return o.State, steps
}

func (n *node) want(id string, state State, steps ...State) Operation {
	n.t.Helper()
	gotState, gotSteps := n.states(id)
	if gotState != state || !slices.Equal(gotSteps, steps) {
		n.t.Errorf("%s is %s with steps %v, want %s with %v", id, gotState, gotSteps, state, steps)
	}
	o, _ := n.r.Get(id)
	return o
}

// only is the ID of the one operation that the node knows.
func (n *node) only() string {
	n.t.Helper()
	all, err := n.r.List()
	if len(all) != 1 || err != nil {
		n.t.Fatalf("there are %d operations, %v", len(all), err)
	}
	return all[0].ID
}

// journal is what is on STATE.
func (n *node) journal(id string) *record {
	n.t.Helper()
	rec, err := journals{dir: n.dir}.load(id + journalSuffix)
	if err != nil {
		n.t.Fatal(err)
	}
	return rec
}

// planned is a definition whose plan is always the same.
func planned(name string, steps ...Step) Definition {
	return Definition{
		Name: name, Exclusive: true,
		Plan:  func(context.Context, Request) (Plan, error) { return Plan{Steps: steps}, nil },
		Steps: func(Request) ([]Step, error) { return steps, nil },
	}
}

// noting is a step that notes that it ran, and that it was undone.
func (n *node) noting(id string) Step {
	return Step{
		ID: id, What: "note " + id, Deadline: time.Minute,
		Run:  func(context.Context, *Progress) error { n.do("%s", id); return nil },
		Undo: func(context.Context, *Progress) error { n.do("undo %s", id); return nil },
	}
}

// an operation has an ID and a journal, and streams its progress.
func TestOperationRunsItsSteps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		first, second := n.noting("first"), n.noting("second")
		second.Run = func(_ context.Context, p *Progress) error {
			p.Report("half of %s", "it")
			rec := n.journal(n.only())
			if rec.Steps[0].State != Done || rec.Steps[1].State != Running {
				t.Errorf("while the second step runs, the journal has %s and %s", rec.Steps[0].State, rec.Steps[1].State)
			}
			n.do("second")
			return nil
		}
		n.definitions = []Definition{planned("reset", first, second)}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		n.expect("first", "second")
		o := n.want(id, Done, Done, Done)
		if o.By != "jo" || o.Began.IsZero() || o.Ended.IsZero() || o.Error != "" {
			t.Errorf("%+v", o)
		}
		if rec := n.journal(id); rec.State != Done {
			t.Errorf("the journal says %s", rec.State)
		}
		if info, err := os.Stat(filepath.Join(n.dir, id+journalSuffix)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info, err)
		}
		var lines []string
		if err := n.r.Watch(t.Context(), id, 0, func(u Update) error {
			for _, e := range u.Events {
				lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", e.Kind, e.Step, e.State, e.Text)))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		want := []string{
			"changed  running asked by jo", "changed first running note first", "changed first done", "changed second running note second",
			"said second  half of it", "changed second done", "changed  done",
		}
		if diff := cmp.Diff(want, lines); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		spec, err := Operations.Get(n.store, id)
		if err != nil || spec.Spec.State != Done || spec.Spec.Name != "reset" {
			t.Errorf("%+v, %v", spec, err)
		}
	})
}

// A node that restarts goes on with the step that ran, and doesn't run what is done.
func TestOperationGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		slow := n.noting("slow")
		boots := 0
		slow.Run = func(ctx context.Context, _ *Progress) error {
			boots++
			n.do("slow %d", boots)
			if boots > 1 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		n.definitions = []Definition{planned("reset", n.noting("first"), slow, n.noting("last"))}
		n.boot()
		id := n.start("reset")
		synctest.Wait()
		n.halt()
		n.want(id, Running, Done, Running, Pending)
		n.boot()
		defer n.halt()
		synctest.Wait()
		n.want(id, Done, Done, Done, Done)
		n.expect("first", "slow 1", "slow 2", "last")
	})
}

func TestStepsThatFail(t *testing.T) {
	t.Parallel()
	broken := func(context.Context, *Progress) error { return errors.New("the disk is gone") }
	stuck := func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
	deaf := func(context.Context, *Progress) error { <-time.After(time.Hour); return nil }
	panics := func(context.Context, *Progress) error { panic("oh") }
	for name, c := range map[string]struct {
		change func(s *Step)
		state  State
		steps  []State
		why    string
		did    []string
	}{
		"an error":       {func(s *Step) { s.Run = broken }, Failed, []State{Undone, Undone, Pending}, "the disk is gone", []string{"first", "undo middle", "undo first"}},
		"the deadline":   {func(s *Step) { s.Run = stuck }, Failed, []State{Undone, Undone, Pending}, "middle: not done within 1m0s", []string{"first", "undo middle", "undo first"}},
		"deaf":           {func(s *Step) { s.Run = deaf }, Failed, []State{Undone, Undone, Pending}, "left to itself", []string{"first", "undo middle", "undo first"}},
		"a panic":        {func(s *Step) { s.Run = panics }, Failed, []State{Undone, Undone, Pending}, "panic: oh", []string{"first", "undo middle", "undo first"}},
		"optional":       {func(s *Step) { s.Run, s.Optional = stuck, true }, Done, []State{Done, Skipped, Done}, "not done within 1m0s", []string{"first", "last"}},
		"not needed":     {func(s *Step) { s.Run = func(context.Context, *Progress) error { return Skip("it is a worker") } }, Done, []State{Done, Skipped, Done}, "it is a worker", []string{"first", "last"}},
		"no way back":    {func(s *Step) { s.Run, s.PointOfNoReturn = broken, true }, Failed, []State{Done, Failed, Pending}, "middle: the disk is gone", []string{"first"}},
		"undo fails too": {func(s *Step) { s.Run, s.Undo = broken, broken }, Failed, []State{Undone, Failed, Pending}, "middle isn't undone", []string{"first", "undo first"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				middle := n.noting("middle")
				c.change(&middle)
				n.definitions = []Definition{planned("reset", n.noting("first"), middle, n.noting("last"))}
				n.boot()
				id := n.start("reset")
				time.Sleep(10 * time.Minute)
				o := n.want(id, c.state, c.steps...)
				if !strings.Contains(o.Error+o.Steps[1].Reason, c.why) {
					t.Errorf("%q and %q, want %q", o.Error, o.Steps[1].Reason, c.why)
				}
				n.expect(c.did...)
				time.Sleep(time.Hour) // the deaf one
				n.halt()
			})
		})
	}
}

func TestAbort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		waits := n.noting("drain")
		waits.Run = func(ctx context.Context, _ *Progress) error { n.do("drain"); <-ctx.Done(); return ctx.Err() }
		n.definitions = []Definition{planned("reset", n.noting("cordon"), waits, n.noting("wipe"))}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		if err := n.r.Abort(id, "jo"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		n.expect("cordon", "drain", "undo drain", "undo cordon")
		if o := n.want(id, Aborted, Undone, Undone, Pending); o.Error != "aborted by jo" {
			t.Errorf("%q", o.Error)
		}
		if err := n.r.Abort(id, "jo"); !errors.As(err, new(Refusal)) {
			t.Errorf("the second time: %v", err)
		}
		if err := n.r.Abort("reset-x", "jo"); !errors.Is(err, ErrNotFound) {
			t.Errorf("what isn't there: %v", err)
		}
	})
}

// A step that nothing is to be undone of has ended with the abort, also for a node
// that restarts while it undoes the others.
func TestAbortOfAStepWithoutUndo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		cordon, drain := n.noting("cordon"), n.noting("drain")
		boots := 0
		cordon.Undo = func(ctx context.Context, _ *Progress) error {
			if boots++; boots > 1 {
				n.do("undo cordon")
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		drain.Run, drain.Undo = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }, nil
		n.definitions = []Definition{planned("reboot", cordon, drain, n.noting("end"))}
		n.boot()
		id := n.start("reboot")
		synctest.Wait()
		if err := n.r.Abort(id, "jo"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		o := n.want(id, Undoing, Undoing, Failed, Pending)
		if s := o.Steps[1]; s.Reason != "aborted by jo" || s.Ended.IsZero() {
			t.Errorf("step %+v", s)
		}
		n.halt()
		n.boot()
		defer n.halt()
		synctest.Wait()
		n.want(n.only(), Aborted, Undone, Failed, Pending)
		n.expect("cordon", "undo cordon")
	})
}

func TestAbortIsRefusedFromThePointOfNoReturnOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		leave, after := n.noting("leave"), n.noting("wait")
		leave.PointOfNoReturn = true
		after.Run = func(context.Context, *Progress) error { time.Sleep(time.Second); return nil }
		n.definitions = []Definition{planned("reset", n.noting("cordon"), leave, after)}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		if err := n.r.Abort(id, "jo"); !errors.As(err, new(Refusal)) || !strings.Contains(err.Error(), "leave") {
			t.Errorf("%v", err)
		}
		time.Sleep(time.Minute)
		n.want(id, Done, Done, Done, Done)
	})
}

// A node that restarts while it undoes something undoes the rest.
func TestUndoingGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		second := n.noting("second")
		boots := 0
		second.Undo = func(ctx context.Context, _ *Progress) error {
			if boots++; boots > 1 {
				n.do("undo second")
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		second.Run = func(context.Context, *Progress) error { return errors.New("no") }
		n.definitions = []Definition{planned("reset", n.noting("first"), second)}
		n.boot()
		id := n.start("reset")
		synctest.Wait()
		n.want(id, Undoing, Done, Undoing)
		n.halt()
		n.boot()
		defer n.halt()
		synctest.Wait()
		n.want(id, Failed, Undone, Undone)
		n.expect("first", "undo second", "undo first")
	})
}

// What can't be undone isn't tried again when the node restarts while an earlier step is
// undone: both would be undone at once, which no journal may say.
func TestUndoingThatFailedIsNotRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		first, second := n.noting("first"), n.noting("second")
		first.Undo = func(ctx context.Context, _ *Progress) error {
			n.do("undo first")
			<-ctx.Done()
			return ctx.Err()
		}
		second.Run = func(context.Context, *Progress) error { return errors.New("no") }
		second.Undo = func(context.Context, *Progress) error { n.do("undo second"); return errors.New("it stays") }
		n.definitions = []Definition{planned("reset", first, second)}
		n.boot()
		id := n.start("reset")
		for range maxAttempts {
			synctest.Wait()
			n.want(id, Undoing, Undoing, Failed)
			n.halt()
			n.boot()
		}
		defer n.halt()
		synctest.Wait()
		n.want(id, Failed, Failed, Failed)
		n.expect("first", "undo second", "undo first", "undo first", "undo first", "undo first", "undo first")
	})
}

// What ends the node at each boot doesn't do so for ever.
func TestStepThatEndsTheNodeEachTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		deadly := n.noting("deadly")
		deadly.Run = func(ctx context.Context, _ *Progress) error { n.do("deadly"); <-ctx.Done(); return ctx.Err() }
		n.definitions = []Definition{planned("reset", deadly)}
		n.boot()
		id := n.start("reset")
		for range maxAttempts {
			synctest.Wait()
			n.want(id, Running, Running)
			n.halt()
			n.boot()
		}
		synctest.Wait()
		defer n.halt()
		if o := n.want(id, Failed, Undone); !strings.Contains(o.Error, "has ended 5 times") {
			t.Errorf("%q", o.Error)
		}
	})
}

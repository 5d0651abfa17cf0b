package operation

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// try tries to begin an operation.
func (n *node) try(a Ask) (Operation, error) {
	a.By = "jo"
	return n.r.Start(n.t.Context(), a)
}

func (n *node) refused(a Ask, parts ...string) {
	n.t.Helper()
	_, err := n.try(a)
	if !errors.As(err, new(Refusal)) {
		n.t.Errorf("%s isn't refused: %v", a.Name, err)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			n.t.Errorf("%q doesn't say %q", err, part)
		}
	}
}

func TestExclusiveOperationsRunOneAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		waits := n.noting("wait")
		waits.Run = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
		watch := planned("watch", n.noting("look"))
		watch.Exclusive = false
		n.definitions = []Definition{planned("reset", waits), planned("reboot", n.noting("reboot")), watch}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		n.refused(Ask{Name: "reboot"}, "this node is running reset ("+id+") since 2000-01-01T")
		n.refused(Ask{Name: "reboot", DryRun: true}, id)
		n.start("watch")
		time.Sleep(2 * time.Minute)
		n.want(id, Failed, Undone)
		n.start("reboot")
		synctest.Wait()
		n.expect("look", "undo wait", "reboot")
		if _, err := n.try(Ask{Name: "upgrade"}); !errors.Is(err, ErrNotFound) {
			t.Errorf("what isn't there: %v", err)
		}
	})
}

func TestTooManyOperations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		waits := n.noting("wait")
		waits.Optional = true
		waits.Run = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
		patience := planned("patience", waits)
		patience.Exclusive = false
		n.definitions = []Definition{patience}
		n.boot()
		defer n.halt()
		for range maxRunning {
			n.start("patience")
		}
		n.refused(Ask{Name: "patience"}, "8 operations run on this node already")
		n.refused(Ask{Name: "patience", Arguments: strings.Repeat("x", maxArguments-1)}, "65537 bytes")
	})
}

// A plan that refuses, hangs, panics or is none changes nothing.
func TestPlansThatAreNone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		plan func(ctx context.Context, r Request) (Plan, error)
		why  string
	}{
		"refuses":  {func(context.Context, Request) (Plan, error) { return Plan{}, errors.New("it is the last member") }, "reset: it is the last member"},
		"hangs":    {func(ctx context.Context, _ Request) (Plan, error) { <-ctx.Done(); return Plan{}, ctx.Err() }, "deadline exceeded"},
		"panics":   {func(context.Context, Request) (Plan, error) { panic("oh") }, "panic: oh"},
		"is empty": {func(context.Context, Request) (Plan, error) { return Plan{}, nil }, "a defect of operation reset: a plan has 1 to 64 steps"},
		"has no deadline": {func(context.Context, Request) (Plan, error) {
			return Plan{Steps: []Step{{ID: "a", What: "a", Run: func(context.Context, *Progress) error { return nil }}}}, nil
		}, `step "a" needs a description, a deadline`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, Definition{Name: "reset", Plan: c.plan, Steps: func(Request) ([]Step, error) { return nil, nil }})
				n.boot()
				defer n.halt()
				if _, err := n.try(Ask{Name: "reset"}); err == nil || !strings.Contains(err.Error(), c.why) {
					t.Errorf("%v, want %q", err, c.why)
				}
				if all, err := n.r.List(); len(all) != 0 || err != nil {
					t.Errorf("%+v", all)
				}
			})
		})
	}
}

func TestDefinitionsThatAreNone(t *testing.T) {
	t.Parallel()
	for _, d := range [][]Definition{{{Name: "Reset"}}, {planned("a"), planned("a")}, {{Name: "reset"}}} {
		if _, err := New(Options{Definitions: d}); err == nil {
			t.Errorf("%+v is taken", d)
		}
	}
}

func TestDryRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.definitions = []Definition{planned("reset", n.noting("drain"), n.noting("wipe"))}
		n.lock = &lock{holder: &Holder{Node: "cp-2", Name: "reset", ID: "reset-b"}}
		n.boot()
		defer n.halt()
		o, err := n.try(Ask{Name: "reset", DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if o.ID != "" || o.State != Pending || len(o.Steps) != 2 || o.Steps[0].What != "note drain" || o.Steps[0].Deadline != time.Minute {
			t.Errorf("%+v", o)
		}
		if len(o.Warnings) != 1 || !strings.Contains(o.Warnings[0], "refused now: node cp-2 is running reset (reset-b)") {
			t.Errorf("%q", o.Warnings)
		}
		n.expect()
		if all, err := n.r.List(); len(all) != 0 || err != nil {
			t.Errorf("%+v", all)
		}
	})
}

// A node whose STATE is broken can be restarted; what must go on after a restart
// doesn't begin there.
func TestJournalThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		reboot := planned("reboot", n.noting("reboot"))
		reboot.WithoutJournal = true
		n.definitions = []Definition{reboot, planned("upgrade", n.noting("upgrade"))}
		n.bootStateless()
		defer n.halt()
		if _, err := n.try(Ask{Name: "upgrade"}); err == nil || !strings.Contains(err.Error(), "STATE, where its journal is to be, isn't mounted") {
			t.Errorf("%v", err)
		}
		n.start("reboot")
		synctest.Wait()
		n.expect("reboot")
		if all, err := n.r.List(); len(all) != 1 || !errors.Is(err, errUnread) {
			t.Errorf("%+v, %v", all, err)
		}
		// A client that comes back too early doesn't take that for the end.
		if _, err := n.r.Get("upgrade-before"); errors.Is(err, ErrNotFound) || !errors.Is(err, errUnread) {
			t.Errorf("before the journals are read: %v", err)
		}
		n.r.Open()
		synctest.Wait()
		if _, err := n.r.Get("upgrade-before"); !errors.Is(err, ErrNotFound) {
			t.Errorf("after that: %v", err)
		}
		if err := os.RemoveAll(n.dir); err != nil {
			t.Fatal(err)
		}
		if _, err := n.try(Ask{Name: "upgrade"}); err == nil || !strings.Contains(err.Error(), "write ") {
			t.Errorf("%v", err)
		}
		id := n.start("reboot")
		synctest.Wait()
		n.expect("reboot", "reboot")
		var said []string
		if err := n.r.Watch(t.Context(), id, 0, func(u Update) error {
			for _, e := range u.Events {
				said = append(said, e.Text)
			}
			return nil
		}); err != nil || strings.Count(strings.Join(said, "\n"), "goes on without a journal") != 1 {
			t.Errorf("%q, %v", said, err)
		}
	})
}

// A disk that doesn't answer doesn't keep a node from being restarted. What comes to the disk too late isn't done again
// after that.
func TestJournalThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		reboot := planned("reboot", n.noting("reboot"))
		reboot.WithoutJournal = true
		n.definitions = []Definition{reboot}
		n.boot()
		defer n.halt()
		n.hangs = make(chan struct{})
		began := time.Now()
		id := n.start("reboot")
		synctest.Wait()
		n.expect("reboot")
		if took := time.Since(began); took > journalTimeout {
			t.Errorf("it begins after %s", took)
		}
		n.want(id, Done, Done)
		close(n.hangs)
		synctest.Wait()
		if left, err := os.ReadDir(n.dir); err != nil || len(left) != 0 {
			t.Errorf("%v, %v", left, err)
		}
	})
}

// STATE breaks while an operation runs: what was done is undone.
func TestJournalThatBreaksInTheMiddle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		breaks := n.noting("break")
		breaks.Run = func(context.Context, *Progress) error { return os.RemoveAll(n.dir) }
		n.definitions = []Definition{planned("upgrade", n.noting("first"), breaks, n.noting("last"))}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		synctest.Wait()
		if o := n.want(id, Failed, Undone, Undone, Pending); !strings.Contains(o.Error, "break: operation "+id+": write ") {
			t.Errorf("%q", o.Error)
		}
		n.expect("first", "undo break", "undo first")
	})
}

// From the point of no return on, it comes to its end, and the next boot doesn't begin
// once more with what the last journal says.
func TestJournalThatBreaksPastThePointOfNoReturn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		wipe, end := n.noting("wipe"), n.noting("end")
		wipe.PointOfNoReturn, end.EndsNode = true, true
		wipe.Run = func(context.Context, *Progress) error { n.do("wipe"); n.full.Store(true); return nil }
		n.definitions = []Definition{planned("reset", wipe, end)}
		n.boot()
		id := n.start("reset")
		time.Sleep(2 * watcherBudget)
		n.want(id, Done, Done, Done)
		n.halt()
		n.boot()
		defer n.halt()
		time.Sleep(2 * watcherBudget)
		n.expect("wipe", "end")
	})
}

// What ends the node doesn't do so at each boot because it can't be written down.
func TestJournalThatCannotBeWrittenAfterARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		drain, end := n.noting("drain"), n.noting("end")
		drain.Run, drain.Undo = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }, nil
		end.EndsNode = true
		d := planned("reboot", n.noting("cordon"), drain, end)
		d.WithoutJournal = true
		n.definitions = []Definition{d}
		n.boot()
		id := n.start("reboot")
		synctest.Wait()
		n.halt()
		n.full.Store(true)
		n.boot()
		defer n.halt()
		time.Sleep(2 * time.Minute)
		if o := n.want(id, Failed, Undone, Failed, Pending); o.Error != "after a restart, its journal can't be written" {
			t.Errorf("%q", o.Error)
		}
		n.expect("cordon", "undo cordon")
	})
}

// Once STATE is wiped, nothing writes there any more.
func TestStepThatWipesTheJournal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		wipe := n.noting("wipe")
		wipe.WipesJournal, wipe.PointOfNoReturn = true, true
		wipe.Run = func(context.Context, *Progress) error {
			if rec := n.journal(n.only()); rec.Steps[0].State != Running {
				t.Errorf("the journal says %s", rec.Steps[0].State)
			}
			return os.Remove(filepath.Join(n.dir, n.only()+journalSuffix))
		}
		n.definitions = []Definition{planned("reset", wipe, n.noting("off"))}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		n.want(id, Done, Done, Done)
		n.expect("off")
		if left, err := os.ReadDir(n.dir); err != nil || len(left) != 0 {
			t.Errorf("%v, %v", left, err)
		}
	})
}

// After a restart the plan is the one of the record: nothing looks at a cluster that may be
// down. Without the code of its steps an operation has failed.
func TestResumeTakesThePlanFromTheRecord(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		waits := n.noting("wait")
		waits.Undo = nil
		boots := 0
		waits.Run = func(ctx context.Context, _ *Progress) error {
			if boots++; boots > 1 {
				n.do("wait")
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		d := planned("reset", waits)
		d.Steps = func(r Request) ([]Step, error) {
			if !r.Resuming || string(r.Arguments) != `"all"` || r.ID == "" || r.By != "jo" {
				t.Errorf("asked for the steps of %+v", r)
			}
			return []Step{n.noting("other"), waits}, nil // more than the plan had
		}
		plans := 0
		d.Plan = func(context.Context, Request) (Plan, error) { plans++; return Plan{Steps: []Step{waits}}, nil }
		n.definitions = []Definition{d, planned("reboot", n.noting("reboot"))}
		n.boot()
		o, err := n.r.Start(t.Context(), Ask{Name: "reset", By: "jo", Arguments: "all"})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		n.halt()
		n.boot()
		n.want(o.ID, Done, Done)
		n.expect("wait")
		if plans != 1 {
			t.Errorf("planned %d times", plans)
		}
		boots = 0
		id := n.start("reset")
		synctest.Wait()
		n.halt()
		n.definitions[0].Steps = func(Request) ([]Step, error) { return nil, errors.New("no such argument") }
		n.boot()
		defer n.halt()
		if o := n.want(id, Failed, Failed); !strings.Contains(o.Error, "can't go on after a restart: no such argument") {
			t.Errorf("%q", o.Error)
		}
		n.start("reboot")
	})
}

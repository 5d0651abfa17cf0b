package operation

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
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
		n.refused(Ask{Name: "patience", Arguments: make([]byte, maxArguments+1)}, "65537 bytes")
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
				n := newNode(t, Definition{Name: "reset", Plan: c.plan})
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

// lock is one of a cluster that there isn't.
type lock struct {
	mu     sync.Mutex // guards what follows
	holder *Holder
	broken error
	tries  int
	given  []time.Duration
}

func (k *lock) Take(_ context.Context, h Holder) (Taken, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tries++
	switch {
	case k.broken != nil:
		return nil, k.broken
	case k.holder != nil && k.holder.ID != h.ID:
		return nil, &HeldError{*k.holder}
	}
	k.holder = &h
	return k, nil
}

func (k *lock) Look(context.Context) (*Holder, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.holder, k.broken
}

func (k *lock) Release(_ context.Context, after time.Duration) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.given = append(k.given, after)
	if after == 0 {
		k.holder = nil
	}
	return nil
}

func (k *lock) state() (holder *Holder, tries int, given []time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.holder, k.tries, k.given
}

func (k *lock) set(holder *Holder, broken error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.holder, k.broken = holder, broken
}

// One node of the cluster at a time; who has the lock is named.
func TestLockOfTheCluster(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{holder: &Holder{Node: "cp-2", Name: "reset", ID: "reset-b", Since: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)}}
		n.lock = k
		work := n.noting("work")
		work.Run = func(context.Context, *Progress) error {
			if h := holderOf(k); h != nil {
				n.do("work with the lock of %s", h.Name)
			}
			return nil
		}
		peaceful := planned("look", n.noting("look"))
		peaceful.Exclusive = false
		n.definitions = []Definition{planned("reboot", work), peaceful}
		n.boot()
		defer n.halt()
		n.refused(Ask{Name: "reboot"}, "node cp-2 is running reset (reset-b) since 2026-05-01T12:00:00Z", "gbctl -n cp-2 operation attach reset-b")
		n.start("look")
		synctest.Wait()
		if _, tries, _ := k.state(); tries != 1 {
			t.Errorf("the lock was asked for %d times, want once: what disrupts nothing needs none", tries)
		}
		k.set(nil, nil)
		id := n.start("reboot")
		synctest.Wait()
		n.want(id, Done, Done)
		n.expect("look", "work with the lock of reboot")
		if holder, _, given := k.state(); holder != nil || len(given) != 1 {
			t.Errorf("%v has it; given back: %v", holder, given)
		}

		// Without a quorum nobody can tell: it goes on, and says so.
		k.set(nil, errors.New("etcd has no quorum"))
		id = n.start("reboot")
		o, _ := n.r.Get(id)
		if len(o.Warnings) != 1 || !strings.HasSuffix(o.Warnings[0], "nothing keeps them from a disruptive operation at the same time: etcd has no quorum") {
			t.Errorf("%q", o.Warnings)
		}
	})
}

// A plan may say that it can't wait for others.
func TestPlanWithoutLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{holder: &Holder{Node: "cp-2", ID: "reset-b"}}
		n.lock = k
		d := planned("reset", n.noting("wipe"))
		plan := d.Plan
		d.Plan = func(ctx context.Context, r Request) (Plan, error) {
			p, err := plan(ctx, r)
			p.Unlocked = "it was asked for without grace"
			return p, err
		}
		n.definitions = []Definition{d}
		n.boot()
		defer n.halt()
		o, err := n.try(Ask{Name: "reset"})
		if err != nil || len(o.Warnings) != 1 || !strings.HasSuffix(o.Warnings[0], "it was asked for without grace") {
			t.Errorf("%q, %v", o.Warnings, err)
		}
		synctest.Wait()
		if _, tries, given := k.state(); tries != 0 || given != nil {
			t.Errorf("the lock was asked for %d times, and given back %v", tries, given)
		}
	})
}

// The lock stays while the node restarts in the middle, and is taken again.
func TestLockOverARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{}
		n.lock = k
		restart := n.noting("restart")
		restart.EndsNode, restart.Hold = true, 10*time.Minute
		n.definitions = []Definition{planned("reboot", restart, n.noting("uncordon"))}
		n.boot()
		n.start("reboot")
		time.Sleep(2 * lastWords)
		n.halt()
		if holder, _, given := k.state(); holder == nil || len(given) != 1 || given[0] != 10*time.Minute {
			t.Fatalf("%v has it; given back: %v", holder, given)
		}
		k.set(holderOf(k), errors.New("etcd starts")) // etcd isn't up yet
		n.boot()
		time.Sleep(time.Minute)
		n.expect("restart")
		k.set(holderOf(k), nil)
		time.Sleep(time.Minute)
		n.expect("restart", "uncordon")
		if holder, _, given := k.state(); holder != nil || len(given) != 2 {
			t.Errorf("%v has it; given back: %v", holder, given)
		}
		n.halt()
	})
}

func holderOf(k *lock) *Holder {
	h, _, _ := k.state()
	return h
}

// A node that is restarted by somebody else keeps the lock for a while, too.
func TestLockOfAnOperationThatIsCutShort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{}
		n.lock = k
		waits := n.noting("wait")
		waits.Run = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
		n.definitions = []Definition{planned("reboot", waits)}
		n.boot()
		n.start("reboot")
		synctest.Wait()
		n.halt()
		if holder, _, given := k.state(); holder == nil || len(given) != 1 || given[0] != restartHold {
			t.Errorf("%v has it; given back: %v", holder, given)
		}
	})
}

// Whoever aborts an operation before its node has the lock again doesn't leave others
// waiting.
func TestLockOfAnOperationThatIsAbortedAfterARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{}
		n.lock = k
		waits := n.noting("wait")
		waits.Run = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
		n.definitions = []Definition{planned("reboot", waits)}
		n.boot()
		id := n.start("reboot")
		synctest.Wait()
		n.halt()
		k.set(holderOf(k), errors.New("etcd starts"))
		n.boot()
		defer n.halt()
		if err := n.r.Abort(id, "jo"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		n.want(id, Aborted, Undone)
		k.set(holderOf(k), nil)
		time.Sleep(10 * time.Second)
		if holder := holderOf(k); holder != nil {
			t.Errorf("%s still has it", holder)
		}
	})
}

// What has begun comes to its end, whatever the lock says.
func TestLockThatIsLostOverARestart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		holder *Holder
		broken error
		after  time.Duration
	}{"silent": {nil, errors.New("no quorum"), lockSilence}, "held": {&Holder{Node: "cp-2", ID: "reset-b"}, nil, lockHeld}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				k := &lock{}
				n.lock = k
				restart := n.noting("restart")
				restart.EndsNode = true
				n.definitions = []Definition{planned("reboot", restart, n.noting("uncordon"))}
				n.boot()
				id := n.start("reboot")
				time.Sleep(2 * lastWords)
				n.halt()
				k.set(c.holder, c.broken)
				n.boot()
				time.Sleep(c.after - time.Minute)
				n.expect("restart")
				n.want(id, Running, Done, Pending)
				time.Sleep(2 * time.Minute)
				n.expect("restart", "uncordon")
				n.halt()
			})
		})
	}
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

// A plan that hangs at a boot keeps nobody waiting, but for what is to begin.
func TestResumeThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		waits := n.noting("wait")
		waits.Run = func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }
		d := planned("reset", waits)
		plan := d.Plan
		d.Plan = func(ctx context.Context, r Request) (Plan, error) {
			if r.Resuming {
				<-ctx.Done()
				return Plan{}, ctx.Err()
			}
			return plan(ctx, r)
		}
		n.definitions = []Definition{d, planned("reboot", n.noting("reboot"))}
		n.boot()
		id := n.start("reset")
		synctest.Wait()
		n.halt()
		before := time.Now()
		n.boot()
		defer n.halt()
		if time.Since(before) > 0 {
			t.Errorf("the boot took %s longer", time.Since(before))
		}
		n.start("reboot") // once it is known what goes on
		synctest.Wait()
		n.expect("reboot")
		if o, err := n.r.Get(id); err != nil || o.State != Failed || !strings.Contains(o.Error, "can't go on after a restart") {
			t.Errorf("%+v, %v", o, err)
		}
	})
}

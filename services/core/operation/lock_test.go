package operation

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// lock is one of a cluster that there isn't.
type lock struct {
	mu     sync.Mutex // guards what follows
	holder *Holder
	broken error
	tries  int
	given  []time.Duration
	during func()        // a try
	slow   time.Duration // of a release
}

func (k *lock) Take(_ context.Context, h Holder) (Taken, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tries++
	if k.during != nil {
		k.during()
	}
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
	time.Sleep(k.slow)
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

// Who sees that an operation is done can begin the next one, also while the lock is given back.
func TestNextOperationWhileTheLockIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.lock = &lock{slow: time.Second}
		n.definitions = []Definition{planned("reset", n.noting("work"))}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		n.want(id, Done, Done)
		n.start("reset")
		time.Sleep(time.Minute)
		n.expect("work", "work")
	})
}

// One of those that need it at a time; who has the lock is named.
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

// A lock that can't be had for a moment, as etcd elects, is asked for again; who has it
// then is in the way all the same.
func TestLockThatComesLate(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		silent time.Duration
		holder *Holder
		locked bool
	}{
		"soon":              {silent: lockPatience / 2, locked: true},
		"too late":          {silent: 2 * lockPatience},
		"and another's":     {silent: lockPatience / 2, holder: &Holder{Node: "cp-2", ID: "reset-b"}},
		"of who asks first": {locked: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				k := &lock{}
				if tt.silent > 0 {
					k.broken = errors.New("no leader")
					time.AfterFunc(tt.silent, func() { k.set(tt.holder, nil) })
				}
				n.lock = k
				n.definitions = []Definition{planned("reboot", n.noting("work"))}
				n.boot()
				defer n.halt()
				if tt.holder != nil {
					n.refused(Ask{Name: "reboot"}, "node cp-2")
					return
				}
				o, err := n.r.Get(n.start("reboot"))
				if err != nil || tt.locked == (len(o.Warnings) > 0) {
					t.Errorf("%q, %v", o.Warnings, err)
				}
				synctest.Wait()
				n.want(o.ID, Done, Done)
				n.expect("work")
			})
		})
	}
}

// Who is called off while it looks around has seen nothing, and does nothing: what it
// couldn't ask isn't a reason to go without others, or without the lock.
func TestCalledOffBeforeItBegins(t *testing.T) {
	t.Parallel()
	for name, during := range map[string]struct {
		planning, asking bool
		broken           error
	}{
		"while it plans":                         {planning: true},
		"while it asks for the lock":             {asking: true, broken: context.Canceled},
		"while it asks for the lock, and has it": {asking: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, callOff := context.WithCancel(t.Context())
				n := newNode(t)
				k := &lock{broken: during.broken}
				n.lock = k
				if during.asking {
					k.during = callOff
				}
				d := planned("reboot", n.noting("end"))
				d.Plan = func(context.Context, Request) (Plan, error) {
					if during.planning {
						callOff()
					}
					return Plan{Steps: []Step{n.noting("end")}, Warnings: []string{"nobody could be asked"}}, nil
				}
				n.definitions = []Definition{d}
				n.boot()
				defer n.halt()
				if _, err := n.r.Start(ctx, Ask{Name: "reboot", By: "jo"}); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nothing is done") {
					t.Errorf("it was called off: %v", err)
				}
				synctest.Wait()
				n.expect()
				if all, err := n.r.List(); len(all) != 0 || err != nil {
					t.Errorf("%v, %v", all, err)
				}
				if holder, _, _ := k.state(); holder != nil {
					t.Errorf("%v has the lock", holder)
				}
			})
		})
	}
}

// What began before a restart goes on, however long the node takes to look at it.
func TestResumedThoughPlanningIsSlow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		wait := Step{ID: "wait", What: "wait", Deadline: time.Hour, Run: func(ctx context.Context, _ *Progress) error { <-ctx.Done(); return ctx.Err() }}
		n.definitions = []Definition{planned("reset", wait)}
		n.boot()
		id := n.start("reset")
		synctest.Wait()
		n.halt()
		slow := planned("reset", n.noting("wait"))
		plan := slow.Plan
		slow.Plan = func(ctx context.Context, r Request) (Plan, error) {
			<-ctx.Done()
			return plan(ctx, r)
		}
		n.definitions = []Definition{slow}
		n.boot()
		defer n.halt()
		time.Sleep(2 * planTimeout) // of the bubble
		synctest.Wait()
		n.want(id, Done, Done)
		n.expect("wait")
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
		time.Sleep(2 * watcherBudget)
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
		if holder := holderOf(k); holder == nil || holder.Stays != restartHold {
			t.Errorf("if the power is lost, the lock of %+v doesn't stay for %s", holder, restartHold)
		}
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

// A node that is back and waits for the cluster can be told to do something else.
func TestAbortOfWhatIsLeftAfterARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		k := &lock{}
		n.lock = k
		restart := n.noting("restart")
		restart.EndsNode, restart.PointOfNoReturn, restart.Hold, restart.Undo = true, true, time.Minute, nil
		uncordon, check := n.noting("uncordon"), n.noting("check")
		uncordon.Optional = true
		n.definitions = []Definition{planned("reboot", n.noting("cordon"), restart, uncordon), planned("upgrade", restart, check)}
		n.boot()
		id := n.start("reboot")
		time.Sleep(2 * watcherBudget)
		if err := n.r.Abort(id, "jo"); err == nil || !strings.Contains(err.Error(), "restart has begun") {
			t.Errorf("while the node goes down: %v", err)
		}
		n.halt()
		k.set(holderOf(k), errors.New("etcd has no quorum"))
		n.boot()
		defer func() { n.halt() }()
		n.refused(Ask{Name: "reboot"}, "abort it")
		if err := n.r.Abort(id, "jo"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * lockReclaim)
		n.want(id, Aborted, Done, Done, Pending)
		n.expect("cordon", "restart")
		k.set(nil, nil)
		id = n.start("upgrade")
		time.Sleep(2 * watcherBudget)
		n.halt()
		k.set(holderOf(k), errors.New("etcd has no quorum"))
		n.boot()
		if err := n.r.Abort(id, "jo"); !errors.As(err, new(Refusal)) {
			t.Errorf("what must be done is left: %v", err)
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
				time.Sleep(2 * watcherBudget)
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

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/meta"
)

// A machine that fails with a system that hasn't proved itself boots the other one next.
// After a user has ended it, or if its system has proved itself, it boots the same one.
func TestUnprovenBootReverts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cmdline string
		b       boot.SlotState
		r       request
		next    string
	}{
		"failed":            {"garboard.slot=B", boot.SlotTrying, request{why: "no node", failed: true}, "A"},
		"asked":             {"garboard.slot=B", boot.SlotTrying, request{why: "SIGTERM"}, "B"},
		"proven":            {"garboard.slot=B", boot.SlotGood, request{why: "no node", failed: true}, "B"},
		"from a medium":     {"", boot.SlotTrying, request{why: "no node", failed: true}, "B"},
		"no slot of a name": {"garboard.slot=C", boot.SlotTrying, request{why: "no node", failed: true}, "B"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "meta")
			if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
				t.Fatal(err)
			}
			slots := boot.Slots{A: boot.Slot{State: boot.SlotGood}, B: boot.Slot{State: c.b, Tries: 2}, Choice: "B"}
			if err := meta.Use(path, func(m meta.Change) error { return boot.SlotsKey.Put(m, slots) }); err != nil {
				t.Fatal(err)
			}
			p, _ := newTestPID1(boot.Machine)
			p.cmdline = boot.ParseCmdline(c.cmdline)
			p.findMeta = func() (string, error) { return path, nil }
			for _, ph := range p.orderlyPhases(c.r, nil, nil)[1:2] {
				p.do(ph)
			}
			err := meta.Use(path, func(m meta.Change) (err error) { slots, err = boot.SlotsKey.In(m); return err })
			if err != nil || slots.Next() != c.next {
				t.Errorf("%q boots next: %+v, %v", slots.Next(), slots, err)
			}
			if c.next == "A" && (slots.B.State != boot.SlotBad || slots.B.Reason != "no node") {
				t.Errorf("%+v", slots.B)
			}
		})
	}
}

// A disk is erased after nothing is mounted from it, the directories of a
// container while they are still mounted; and only on a node that is being reset.
func TestErase(t *testing.T) {
	for mode, want := range map[boot.Mode][]string{
		boot.Machine:   {unmountPhase, erasePhase},
		boot.Container: {erasePhase, unmountPhase},
	} {
		p, _ := newTestPID1(mode)
		order := func() (found []string) {
			for _, ph := range p.orderlyPhases(request{}, nil, nil) {
				if slices.Contains(want, ph.what) {
					found = append(found, ph.what)
				}
				if ph.what == erasePhase {
					if err := ph.do(t.Context()); !errors.Is(err, errBroken) {
						t.Errorf("%s: erasing ends with %v", mode, err)
					}
				}
			}
			return found
		}
		if got := order(); !slices.Equal(got, []string{unmountPhase}) {
			t.Errorf("%s without a node: %q", mode, got)
		}
		for _, marked := range []bool{false, true} {
			var n node = resetNode{marked: marked}
			p.node.Store(&n)
			got := order()
			if !marked && !slices.Equal(got, []string{unmountPhase}) || marked && !slices.Equal(got, want) {
				t.Errorf("%s, marked %v: %q, want %q", mode, marked, got, want)
			}
		}
	}
}

var errBroken = errors.New("broken disk")

// resetNode is a node whose disk can't be erased.
type resetNode struct {
	node
	marked bool
}

func (n resetNode) Marked() bool              { return n.marked }
func (resetNode) EraseTime() time.Duration    { return time.Hour }
func (resetNode) Erase(context.Context) error { return errBroken }

// A user must see on the console that a reset node isn't wiped yet.
func TestEraseThatIsNotDone(t *testing.T) {
	for name, erase := range map[string]func(context.Context) error{
		"fails": func(context.Context) error { return errors.New("broken disk") },
		"hangs": func(context.Context) error { select {} },
		"works": func(context.Context) error { return nil },
	} {
		p, s := newTestPID1(boot.Machine)
		budget := time.Minute
		if name == "hangs" {
			budget = time.Millisecond
		}
		exitOf(p, request{intent: powerOff, why: "reset"}, phase{erasePhase, budget, erase})
		if said := strings.Contains(s.String(), "NOT wiped: its next boot does it"); said != (name != "works") {
			t.Errorf("erasing %s, and the console says:\n%s", name, s)
		}
	}
}

// exitOf runs the funnel to its end and returns the intent of the last system call.
func exitOf(p *pid1, r request, phases ...phase) intent {
	left := make(chan intent)
	p.phases = func(request, context.CancelFunc, <-chan error) []phase { return phases }
	p.leave = func(i intent) error {
		left <- i
		select {} // reboot(2) doesn't return
	}
	go p.exit(r, nil, nil)
	return <-left
}

func TestFunnelGoesOnWhateverAPhaseDoes(t *testing.T) {
	p, s := newTestPID1(boot.Machine)
	never := make(chan struct{})
	var last bool
	got := exitOf(p, request{intent: halt, why: "test"},
		phase{"fail", time.Minute, func(context.Context) error { return errors.New("broken disk") }},
		phase{"panic", time.Minute, func(context.Context) error { panic("oh") }},
		phase{"hang", time.Millisecond, func(context.Context) error { <-never; return nil }},
		phase{"last", time.Minute, func(context.Context) error { last = true; return nil }},
	)
	if got != halt || !last {
		t.Errorf("left with %s, last phase done: %v", got, last)
	}
	for _, want := range []string{"init: halt because=test", "fail: broken disk", "panic: panic: oh", "hang: not done after 1ms; going on without", "halt now"} {
		if !strings.Contains(s.String(), want) {
			t.Errorf("console doesn't say %q:\n%s", want, s)
		}
	}
}

func TestSecondRequestDoesNotStartOver(t *testing.T) {
	p, s := newTestPID1(boot.Machine)
	calls := 0
	got := exitOf(p, request{intent: powerOff, why: "power button"}, phase{"once", time.Second, func(context.Context) error {
		calls++
		for range 3 {
			p.ask(request{intent: reboot, why: "ctrl-alt-del"})
		}
		return nil
	}})
	if got != powerOff || calls != 1 {
		t.Errorf("left with %s after %d calls", got, calls)
	}
	if want := "reboot asked for by ctrl-alt-del: the machine is shutting down already"; strings.Count(s.String(), want) != 3 {
		t.Errorf("console:\n%s", s)
	}
}

func TestDelayIsCutByARequest(t *testing.T) {
	p, s := newTestPID1(boot.Machine)
	p.requests <- request{intent: powerOff, why: "power button"}
	if got := exitOf(p, request{intent: reboot, why: "no disk", delay: time.Hour}); got != reboot {
		t.Errorf("left with %s", got)
	}
	if want := "init: reboot because=\"no disk\"\n[garboard] reboot in 1h0m0s; "; !strings.Contains(s.String(), want) {
		t.Errorf("console doesn't say %q:\n%s", want, s)
	}
}

func TestAfterFailureFollowsThePanicArgument(t *testing.T) {
	for line, want := range map[string]struct {
		intent intent
		delay  time.Duration
	}{
		"console=ttyS0":    {reboot, failureDelay},
		"panic=5":          {reboot, 5 * time.Second},
		"quiet panic=-1 x": {reboot, 0},
		"panic=0":          {halt, 0},
		"panic=soon":       {reboot, failureDelay},
	} {
		i, d := afterFailure(boot.ParseCmdline(line))
		if i != want.intent || d != want.delay {
			t.Errorf("%s: %s in %s, want %s in %s", line, i, d, want.intent, want.delay)
		}
	}
}

func TestFailureOfTheNode(t *testing.T) {
	p, _ := newTestPID1(boot.Container)
	if r := p.failure(errors.New("no graph")); r.intent != reboot || r.delay != 0 || r.why != "no graph" {
		t.Errorf("container: %+v", r)
	}
	p, _ = newTestPID1(boot.Machine)
	if r := p.failure(nil); r.intent != reboot || r.delay != failureDelay || r.why == "" {
		t.Errorf("machine: %+v", r)
	}
}

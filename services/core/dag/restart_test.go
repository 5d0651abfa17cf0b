package dag

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// times is a list that a service writes and the test reads.
type times struct {
	mu   sync.Mutex
	list []time.Duration
}

func (t *times) add(d time.Duration) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = append(t.list, d)
	return len(t.list)
}

func (t *times) all() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.list)
}

// crashing fails n times (always, if n < 0) after it has run for a while, and
// records when each run began.
func crashing(id string, n int, ran time.Duration, begins *times) Service {
	begin := time.Now()
	svc := daemon(id)
	run := svc.Run
	svc.Run = func(ctx context.Context, h *Handle) error {
		if i := begins.add(time.Since(begin)); n >= 0 && i > n {
			return run(ctx, h)
		}
		h.Started("Started")
		if !sleep.For(ctx, ran) {
			return ctx.Err()
		}
		return errors.New("exit status 7")
	}
	return svc
}

func TestRestartsPauseLongerEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		r := start(t, crashing("etcd", 4, 0, &begins))
		pass(time.Minute)
		ms := time.Millisecond
		if want := []time.Duration{0, 500 * ms, 1500 * ms, 3500 * ms, 7500 * ms}; !slices.Equal(begins.all(), want) {
			t.Errorf("began at %v", begins.all())
		}
		if s, _ := r.Status("etcd"); !s.Up || s.Restarts != 4 {
			t.Errorf("status %+v", s)
		}
		if messages := r.messages("etcd"); messages[3] != "[Failed]: Failed: exit status 7; next try in 500ms" {
			t.Errorf("%q", messages)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestAStableRunMakesThePauseShortAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		r := start(t, crashing("svc", 5, RestartReset, &begins))
		pass(10 * time.Minute)
		at := begins.all()
		for i := 1; i < len(at); i++ {
			if gap := at[i] - at[i-1]; gap != RestartReset+RestartFirst {
				t.Errorf("began at %v", begins.all())
			}
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestCrashesAreBrakedAndNeverGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		r := start(t, crashing("etcd", -1, time.Second, &begins))
		pass(2 * time.Minute)
		s, _ := r.Status("etcd")
		want := "Failed: exit status 7; next try in 1m4s"
		if s.State != Failed || s.Message != want || !strings.HasPrefix(s.Waiting, "the next try at ") {
			t.Errorf("status %+v", s)
		}
		before := len(begins.all())
		pass(time.Hour)
		if n := len(begins.all()) - before; n < 28 || n > 30 {
			t.Errorf("%d tries in an hour", n)
		}
		// A start by an operator comes at once, and resets the pause.
		before = len(begins.all())
		if err := r.Start(t.Context(), "etcd"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(begins.all()) != before+1 {
			t.Error("start did not end the pause")
		}
		pass(time.Second)
		if s, _ := r.Status("etcd"); !strings.HasSuffix(s.Message, "next try in 500ms") {
			t.Errorf("status %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestPolicies(t *testing.T) {
	for _, c := range []struct {
		policy   RestartPolicy
		err      error
		runs     int
		state    State
		up       bool
		contains string
	}{
		{RestartNever, nil, 1, Finished, true, "Finished"},
		{RestartNever, errors.New("no disk"), 1, Failed, false, "Failed: no disk"},
		{RestartOnError, nil, 1, Finished, true, "Finished"},
		{RestartOnError, errors.New("no disk"), 2, Failed, false, "Failed: no disk; next try in 1s"},
		{RestartAlways, nil, 2, Failed, false, "Failed: it ended without an error; next try in 1s"},
	} {
		t.Run(fmt.Sprintf("%d %v", c.policy, c.err), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				runs := 0
				r := start(t, Service{ID: "x", Restart: c.policy, Run: func(context.Context, *Handle) error { runs++; return c.err }})
				pass(RestartFirst)
				if s, _ := r.Status("x"); runs != c.runs || s.State != c.state || s.Up != c.up || s.Message != c.contains {
					t.Errorf("%d runs, status %+v", runs, s)
				}
				if err := r.end(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// lines is a log that keeps what was written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestAPanicIsTheServicesError(t *testing.T) {
	oops := func() { panic("oops") }
	for name, svc := range map[string]Service{
		"prepare": {Prepare: func(context.Context, *Handle) error { oops(); return nil }, Run: daemon("").Run},
		"run":     {Run: func(_ context.Context, h *Handle) error { h.Started(""); oops(); return nil }},
		"goexit":  {Run: func(context.Context, *Handle) error { runtime.Goexit(); return nil }},
		"skip":    {Skip: func() string { oops(); return "" }, Run: daemon("").Run},
		"health":  {Health: &Health{Check: func(context.Context) error { oops(); return nil }}, Run: daemon("").Run},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log lines
				svc.ID, svc.Restart = "x", RestartNever
				g, err := New(Options{Log: func(string) *slog.Logger { return slog.New(slog.NewTextHandler(&log, nil)) }}, svc, daemon("other"))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- g.Run(ctx) }()
				pass(time.Minute)
				s, _ := g.Status("x")
				want := map[string]string{
					"health": "Health check failed: panic: oops",
					"goexit": "Failed: it ended its goroutine (runtime.Goexit)",
					"skip":   "panic: oops",
				}[name]
				if want == "" {
					want = "Failed: panic: oops"
				}
				if s.Message != want || s.Up {
					t.Errorf("status %+v", s)
				}
				if !strings.Contains(log.String(), "restart_test.go") {
					t.Errorf("no stack in the log: %s", log.String())
				}
				if other, _ := g.Status("other"); !other.Up {
					t.Errorf("status %+v", other)
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestDependantsOutliveADependency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		r := start(t, crashing("containerd", 1, 10*time.Second, &begins), daemon("kubelet", "containerd"))
		pass(10 * time.Second)
		if s, _ := r.Status("containerd"); s.Up {
			t.Errorf("status %+v", s)
		}
		pass(10 * time.Second)
		if s, _ := r.Status("kubelet"); !s.Up || s.Restarts != 0 {
			t.Errorf("status %+v", s)
		}
		if messages := r.messages("kubelet"); messages[len(messages)-1] != "[Running]: Started kubelet" {
			t.Errorf("%q", messages)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

// A need that was up early and is down again when the other needs hold is
// waited for again.
func TestAllNeedsHoldTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		flapping := crashing("flapping", 2, 2900*time.Millisecond, &begins) // up 0–2.9 s, 3.4–6.3 s, from 7.3 s
		r := start(t, flapping, slow("late", 3*time.Second), daemon("top", "flapping", "late"))
		pass(3 * time.Second)
		if s, _ := r.Status("top"); s.Waiting != `service "flapping" to be "up"` {
			t.Errorf("status %+v", s)
		}
		pass(time.Second)
		if s, _ := r.Status("top"); !s.Up {
			t.Errorf("status %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestOperatorStopsAndStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, daemon("base"), slow("mid", time.Second, "base"), daemon("top", "mid"))
		pass(2 * time.Second)
		if err := r.Stop(t.Context(), "mid"); err != nil {
			t.Fatal(err)
		}
		if s, _ := r.Status("mid"); s.State != Finished || s.Up || s.Message != "Stopped" {
			t.Errorf("status %+v", s)
		}
		if s, _ := r.Status("top"); !s.Up {
			t.Errorf("status %+v", s)
		}
		pass(time.Hour)
		if got := r.state("mid"); got != Finished {
			t.Errorf("mid is %s", got)
		}
		for range 2 {
			if err := r.Start(t.Context(), "mid"); err != nil {
				t.Fatal(err)
			}
		}
		pass(2 * time.Second)
		if s, _ := r.Status("mid"); !s.Up {
			t.Errorf("status %+v", s)
		}
		if err := r.Restart(t.Context(), "mid"); err != nil {
			t.Fatal(err)
		}
		if err := r.Stop(t.Context(), "nobody"); err == nil || !strings.Contains(err.Error(), `stop service "nobody": no such service`) {
			t.Error(err)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
		if err := r.Start(t.Context(), "mid"); !errors.Is(err, ErrNotRunning) {
			t.Error(err)
		}
	})
}

// lingering needs some time to stop.
func lingering(id string, d time.Duration) Service {
	svc := daemon(id)
	run := svc.Run
	svc.Run = func(ctx context.Context, h *Handle) error {
		defer time.Sleep(d)
		return run(ctx, h)
	}
	return svc
}

// After a start while a service stops, or a restart without waiting, the
// service runs in the end; after a later stop it doesn't.
func TestStartWhileItStops(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ask  func(*running) error
		want State
	}{
		"start":               {func(r *running) error { return errors.Join(r.Stop(gone, "old"), r.Start(gone, "old")) }, Running},
		"restart":             {func(r *running) error { return r.Restart(gone, "old") }, Running},
		"restart, then stop":  {func(r *running) error { return errors.Join(r.Restart(gone, "old"), r.Stop(gone, "old")) }, Finished},
		"stop, never to come": {func(r *running) error { return r.Stop(gone, "old") }, Finished},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, lingering("old", 5*time.Second))
				if err := test.ask(r); !errors.Is(err, context.Canceled) {
					t.Errorf("nobody waited for it: %v", err)
				}
				pass(time.Second)
				if got := r.state("old"); got != Stopping {
					t.Errorf("old is %s", got)
				}
				pass(5 * time.Second)
				if got := r.state("old"); got != test.want {
					t.Errorf("old is %s in the end, not %s", got, test.want)
				}
				if err := r.end(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestStopWhileItWaitsPreparesAndPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var begins times
		pulling := daemon("pulling")
		pulling.Prepare = func(ctx context.Context, h *Handle) error { <-ctx.Done(); return ctx.Err() }
		r := start(t, pulling, daemon("waiting", "pulling"), crashing("pausing", -1, 0, &begins))
		pass(time.Second)
		for id, state := range map[string]State{"pulling": Preparing, "waiting": Waiting, "pausing": Failed} {
			if got := r.state(id); got != state {
				t.Errorf("%s is %s", id, got)
			}
			if err := r.Stop(t.Context(), id); err != nil {
				t.Error(err)
			}
			if got := r.state(id); got != Finished {
				t.Errorf("%s is %s", id, got)
			}
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

// A reason belongs only to its event.
func TestReasons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, Service{
			ID: "a",
			Prepare: func(_ context.Context, h *Handle) error {
				h.EventOf("Pulling", "text")
				time.Sleep(time.Second)
				return nil
			},
			Run: func(_ context.Context, h *Handle) error {
				h.Started("Started")
				time.Sleep(time.Second)
				return fmt.Errorf("run: %w", reason.With("Broken", errors.New("text")))
			},
			Health: &Health{Check: func(context.Context) error { return reason.With("Sick", errors.New("text")) }},
		})
		for _, want := range []reason.Code{"Pulling", "Sick", "Broken"} {
			if s, _ := r.Status("a"); s.Reason != want {
				t.Errorf("%+v, want %s", s, want)
			}
			pass(time.Second)
		}
		for _, e := range r.Events() {
			if (e.Reason == "") != (e.Message != "text" && e.Message != messageUnhealthy+"text" && e.State != Failed) {
				t.Errorf("%+v", e)
			}
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

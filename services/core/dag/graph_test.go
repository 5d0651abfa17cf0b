package dag

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// daemon runs until it is stopped.
func daemon(id string, dependsOn ...string) Service {
	return Service{ID: id, DependsOn: dependsOn, Run: func(ctx context.Context, h *Handle) error {
		h.Started("Started " + id)
		<-ctx.Done()
		return ctx.Err()
	}}
}

// slow is a daemon that is up after a delay.
func slow(id string, d time.Duration, dependsOn ...string) Service {
	svc := daemon(id, dependsOn...)
	run := svc.Run
	svc.Run = func(ctx context.Context, h *Handle) error {
		if !sleep.For(ctx, d) {
			return ctx.Err()
		}
		return run(ctx, h)
	}
	return svc
}

// running is a graph under test, inside a synctest bubble: its clock advances
// only when every goroutine waits, and the bubble's end proves that none is left.
type running struct {
	*Graph
	t    *testing.T
	stop context.CancelFunc
	done chan error
}

func start(t *testing.T, services ...Service) *running {
	t.Helper()
	g, err := New(Options{SinceBoot: clock()}, services...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{Graph: g, t: t, stop: cancel, done: make(chan error, 1)}
	go func() { r.done <- g.Run(ctx) }()
	synctest.Wait()
	return r
}

// clock counts from the bubble's start, as the kernel's does from its own.
func clock() func() time.Duration {
	begin := time.Now()
	return func() time.Duration { return time.Since(begin) }
}

// pass lets virtual time pass.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (r *running) end() error {
	r.stop()
	return <-r.done
}

// messages returns the events of one service as text.
func (r *running) messages(id string) []string {
	var lines []string
	for _, e := range r.Events() {
		if e.Service == id {
			lines = append(lines, fmt.Sprintf("[%s]: %s", e.State, e.Message))
		}
	}
	return lines
}

func (r *running) want(id string, want ...string) {
	r.t.Helper()
	if diff := cmp.Diff(want, r.messages(id)); diff != "" {
		r.t.Errorf("events of %s (-want +got):\n%s", id, diff)
	}
}

func (r *running) state(id string) State {
	s, _ := r.Status(id)
	return s.State
}

func TestS235WaitingTextShrinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kubelet := daemon("kubelet", "timed", "cri", "networkd")
		kubelet.Run = func(ctx context.Context, h *Handle) error {
			h.Started("Started task kubelet (PID 2334) for container kubelet")
			<-ctx.Done()
			return ctx.Err()
		}
		healthy := time.Now().Add(7 * time.Second)
		kubelet.Health = &Health{Check: func(context.Context) error {
			if time.Now().Before(healthy) {
				return errors.New(`Get "http://127.0.0.1:10248/healthz": dial tcp 127.0.0.1:10248: connect: connection refused`)
			}
			return nil
		}}
		kubelet.Prepare = func(ctx context.Context, h *Handle) error { sleep.For(ctx, time.Second); return nil }
		r := start(t, kubelet, slow("networkd", 2*time.Second), slow("cri", 3*time.Second), slow("timed", 4*time.Second))
		if s, _ := r.Status("kubelet"); s.Waiting != `service "cri" to be "up", service "networkd" to be "up", service "timed" to be "up"` || s.Reason != Behind || s.Health != "?" {
			t.Errorf("status %+v", s)
		}
		pass(10 * time.Second)
		if s, _ := r.Status("kubelet"); s.Waiting != "" || s.Health != "OK" || !s.Up || s.State != Running {
			t.Errorf("status %+v", s)
		}
		// S-235, S-236, S-237, S-238
		r.want("kubelet",
			`[Waiting]: Waiting for service "cri" to be "up", service "networkd" to be "up", service "timed" to be "up"`,
			`[Waiting]: Waiting for service "cri" to be "up", service "timed" to be "up"`,
			`[Waiting]: Waiting for service "timed" to be "up"`,
			`[Preparing]: Running pre state`,
			`[Starting]: Creating service runner`,
			`[Running]: Started task kubelet (PID 2334) for container kubelet`,
			`[Running]: Health check failed: Get "http://127.0.0.1:10248/healthz": dial tcp 127.0.0.1:10248: connect: connection refused`,
			`[Running]: Health check successful`,
		)
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestNewNamesWhatIsWrong(t *testing.T) {
	_, err := New(Options{}, daemon("a", "b"), daemon("b"), daemon("b"), daemon("c", "d"), Service{ID: "e"}, Service{})
	for _, want := range []string{`"b" is there twice`, `"c" depends on "d", which doesn't exist`, `"e" has no Run`, "without an ID"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q isn't in: %v", want, err)
		}
	}
	_, err = New(Options{}, daemon("z", "a"), daemon("a", "b"), daemon("b", "c"), daemon("c", "a"))
	if err == nil || !strings.HasSuffix(err.Error(), "a → b → c → a") {
		t.Errorf("cycle: %v", err)
	}
	_, err = New(Options{}, daemon("self", "self"))
	if err == nil || !strings.HasSuffix(err.Error(), "self → self") {
		t.Errorf("cycle: %v", err)
	}
}

func TestSkippedAndFinishedTasksAreUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		task := Service{ID: "task", Restart: RestartNever, DependsOn: []string{"first"}, Run: func(ctx context.Context, h *Handle) error {
			sleep.For(ctx, time.Second)
			return nil
		}}
		asked := time.Duration(-1)
		begin := time.Now()
		skipped := daemon("skipped", "task")
		skipped.Skip = func() string { asked = time.Since(begin); return "not a control plane" }
		r := start(t, task, skipped, slow("first", time.Second), daemon("last", "skipped", "task"))
		pass(5 * time.Second)
		if asked != 2*time.Second {
			t.Errorf("skip was asked after %s", asked)
		}
		if s, _ := r.Status("skipped"); s.State != Skipped || !s.Up || s.Message != "not a control plane" {
			t.Errorf("status %+v", s)
		}
		if s, _ := r.Status("task"); s.State != Finished || !s.Up {
			t.Errorf("status %+v", s)
		}
		if s, _ := r.Status("last"); !s.Up {
			t.Errorf("status %+v", s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestStopIsInReverseOrderAndParallel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stops []string
		lock := make(chan struct{}, 1)
		stopping := func(id string, takes time.Duration, needs ...string) Service {
			svc := daemon(id, needs...)
			svc.Run = func(ctx context.Context, h *Handle) error {
				h.Started("")
				<-ctx.Done()
				<-time.After(takes)
				lock <- struct{}{}
				stops = append(stops, id)
				<-lock
				return nil
			}
			return svc
		}
		// A finished task is between base and top: the order still holds through it.
		task := Service{ID: "task", Restart: RestartNever, DependsOn: []string{"base"}, Run: func(context.Context, *Handle) error { return nil }}
		r := start(t, stopping("base", time.Second), task, stopping("left", 3*time.Second, "task"), stopping("right", 2*time.Second, "task"), stopping("top", time.Second, "left", "right"))
		pass(time.Second)
		begin := time.Now()
		if err := r.end(); err != nil {
			t.Error(err)
		}
		if want := []string{"top", "right", "left", "base"}; !slices.Equal(stops, want) {
			t.Errorf("stopped %v, want %v", stops, want)
		}
		if took := time.Since(begin); took != 5*time.Second {
			t.Errorf("took %s", took)
		}
		for _, s := range r.Statuses() {
			if s.State != Finished {
				t.Errorf("%s is %s: %s", s.ID, s.State, s.Message)
			}
		}
	})
}

func TestBudgetThenGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		deaf := daemon("deaf", "base")
		deaf.StopBudget = 3 * time.Second
		deaf.Run = func(ctx context.Context, h *Handle) error {
			h.Started("")
			<-release
			h.Event("too late to be heard")
			return nil
		}
		r := start(t, deaf, daemon("base"))
		begin := time.Now()
		err := r.end()
		if err == nil || !strings.HasSuffix(err.Error(), "given up after their budget: deaf") {
			t.Errorf("error: %v", err)
		}
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("took %s", took)
		}
		if s, _ := r.Status("deaf"); s.State != Failed || s.Message != "Given up: it did not stop within 3s" {
			t.Errorf("status %+v", s)
		}
		if got := r.state("base"); got != Finished {
			t.Errorf("base is %s", got)
		}
		close(release)
	})
}

func TestAServiceNeverRunsTwiceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		runs := 0
		deaf := daemon("deaf")
		deaf.StopBudget = time.Second
		deaf.Run = func(ctx context.Context, h *Handle) error {
			runs++
			h.Started("")
			if runs == 1 {
				<-release
			} else {
				<-ctx.Done()
			}
			return nil
		}
		r := start(t, deaf)
		if err := r.Restart(t.Context(), "deaf"); err != nil {
			t.Fatal(err)
		}
		pass(time.Minute)
		if s, _ := r.Status("deaf"); s.State != Waiting || s.Waiting != `the former run of service "deaf" to end` || runs != 1 {
			t.Errorf("%d runs, status %+v", runs, s)
		}
		close(release)
		synctest.Wait()
		if s, _ := r.Status("deaf"); !s.Up || runs != 2 {
			t.Errorf("%d runs, status %+v", runs, s)
		}
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
}

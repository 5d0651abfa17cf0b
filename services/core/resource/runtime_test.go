package resource

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// lines is a log that keeps the messages.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *lines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.MessageKey || a.Key == "stack" {
			return a
		}
		return slog.Attr{}
	}}))
}

// run runs controllers in a bubble until the returned function is called.
func run(t *testing.T, s *Store, log *slog.Logger, controllers ...Controller) (stop func()) {
	t.Helper()
	rt, err := NewRuntime(s, log, controllers...)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- rt.Run(ctx) }()
	synctest.Wait()
	return func() {
		t.Helper()
		cancel()
		must(t, <-done)
	}
}

// pass lets virtual time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

var discard = slog.New(slog.DiscardHandler)

// The path of the design in small: configuration, pod, status.
func TestChangesGoThroughAChainOfControllers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		calls := 0
		toPod := Controller{
			Name: "test.PodController", Inputs: []Input{{Type: configs.Type(), ID: "node"}}, Outputs: []string{pods.Type()},
			Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
				calls++
				c, err := configs.Get(v, "node")
				if errors.Is(err, ErrNotFound) {
					return 0, nil
				}
				return 0, pods.Put(v, "pod", podSpec{Image: c.Spec.Image})
			},
		}
		toStatus := Controller{
			Name: "test.StatusController", Inputs: []Input{{Type: pods.Type()}}, Outputs: []string{statuses.Type()},
			Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
				for _, o := range pods.List(v) {
					if err := statuses.Put(v, o.ID, o.Spec.Image == "good"); err != nil {
						return 0, err
					}
				}
				return 0, nil
			},
		}
		stop := run(t, s, discard, toStatus, toPod)
		w := s.As("machined")
		for i, image := range []string{"bad", "good", "bad"} {
			must(t, configs.Put(w, "node", &podSpec{Image: image}))
			synctest.Wait()
			o, err := statuses.Get(s, "pod")
			must(t, err)
			if o.Spec != (image == "good") || o.Version != uint64(i+1) || o.Owner != "test.StatusController" {
				t.Errorf("%s: %+v", image, o)
			}
		}
		// Another ID isn't an input, and the same content is no change.
		before := calls
		must(t, configs.Put(w, "other", &podSpec{}))
		must(t, configs.Put(w, "node", &podSpec{Image: "bad"}))
		synctest.Wait()
		if calls != before {
			t.Errorf("%d calls for nothing", calls-before)
		}
		stop()
	})
}

func TestManyChangesAreFewCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		calls, last := 0, ""
		stop := run(t, s, discard, Controller{
			Name: "test.Slow", Inputs: []Input{{Type: pods.Type()}},
			Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
				calls++
				if o, err := pods.Get(v, "a"); err == nil {
					last = o.Spec.Image
				}
				<-time.After(time.Second)
				return 0, nil
			},
		})
		for i := range 1000 {
			must(t, pods.Put(s.As("w"), "a", podSpec{Image: fmt.Sprint(i)}))
		}
		pass(time.Hour)
		if calls != 2 || last != "999" {
			t.Errorf("%d calls, the last saw %q", calls, last)
		}
		stop()
	})
}

func TestS276S279S283FailuresAreLoggedAndRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		var log lines
		var at []time.Duration
		begin := time.Now()
		stop := run(t, s, log.logger(), Controller{
			Name: "k8s.ManifestApplyController",
			Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
				at = append(at, time.Since(begin))
				switch len(at) {
				case 1:
					return 0, errors.New("missing cluster.aggregatorCA secret")
				case 2:
					panic("a mistake")
				}
				v.Log().Info("done")
				return 0, nil
			},
		})
		pass(time.Hour)
		stop()
		if len(at) != 3 || at[1] < retryFirst || at[1] > 2*retryFirst || at[2]-at[1] < 2*retryFirst || at[2]-at[1] > 3*retryFirst {
			t.Errorf("calls at %v", at)
		}
		const name = `msg="k8s.ManifestApplyController: `
		got := log.String()
		if !strings.Contains(got, "runtime_test.go") {
			t.Error("no stack in the log")
		}
		var messages []string
		for line := range strings.Lines(got) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), ` stack=`)
			messages = append(messages, line)
		}
		want := []string{
			name + `controller starting"`,
			name + `controller failed: missing cluster.aggregatorCA secret"`,
			name + `controller starting"`,
			name + `panic: a mistake"`,
			name + `controller failed: panic: a mistake"`,
			name + `controller starting"`,
			name + `done"`,
		}
		if strings.Join(messages, "\n") != strings.Join(want, "\n") {
			t.Errorf("log:\n%s", strings.Join(messages, "\n"))
		}
	})
}

func TestAChangeEndsThePauseAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		calls := 0
		stop := run(t, s, discard, Controller{
			Name: "test.C", Inputs: []Input{{Type: pods.Type()}},
			Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
				calls++
				if len(pods.List(v)) == 0 {
					return 0, fmt.Errorf("ask: %w", reason.With("NoPod", errors.New("no pod yet")))
				}
				return 0, nil
			},
		})
		since := time.Now()
		pass(5 * time.Minute)
		if o, err := Failures.Get(s, "test.C"); err != nil || o.Spec != (Failure{since, "NoPod", "ask: no pod yet"}) || o.Version != 1 {
			t.Errorf("%+v, %v", o, err)
		}
		failed := calls
		if failed < 5*60/(30+6) || failed > 20 {
			t.Errorf("%d calls in five minutes", failed)
		}
		must(t, pods.Put(s.As("w"), "a", podSpec{}))
		pass(retryFirst)
		if calls != failed+1 {
			t.Errorf("%d calls after the change", calls-failed)
		}
		if all := Failures.List(s); len(all) > 0 {
			t.Errorf("after a success: %+v", all)
		}
		stop()
	})
}

func TestAgainAsksForACallWithoutAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		stop := run(t, NewStore(), discard, Controller{Name: "test.C", Reconcile: func(context.Context, View) (time.Duration, error) {
			calls++
			return 10 * time.Second, nil
		}})
		pass(time.Minute + time.Second)
		if calls != 7 {
			t.Errorf("%d calls", calls)
		}
		stop()
	})
}

// A controller that knows when to try again is taken at its word.
func TestRetryIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("nobody answers")
		var calls atomic.Int32
		s := NewStore()
		stop := run(t, s, discard, Controller{Name: "test.C", Inputs: []Input{{Type: pods.Type()}}, Reconcile: func(context.Context, View) (time.Duration, error) {
			calls.Add(1)
			return 0, fmt.Errorf("ask: %w", RetryIn(why, time.Hour))
		}})
		pass(59 * time.Minute)
		if n := calls.Load(); n != 1 {
			t.Errorf("%d calls within an hour", n)
		}
		pass(14 * time.Minute) // jitter
		if n := calls.Load(); n != 2 {
			t.Errorf("%d calls after an hour", n)
		}
		must(t, pods.Put(s.As("w"), "a", podSpec{}))
		synctest.Wait()
		if n := calls.Load(); n != 3 {
			t.Errorf("%d calls once an input has changed", n)
		}
		stop()
		if err := RetryIn(why, time.Hour); !errors.Is(err, why) || err.Error() != why.Error() {
			t.Error(err)
		}
	})
}

// A quiet input wakes nobody, and a leisurely controller waits a moment after a change.
func TestWhatDoesNotWakeAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		var quiet, leisurely atomic.Int32
		count := func(calls *atomic.Int32) func(context.Context, View) (time.Duration, error) {
			return func(context.Context, View) (time.Duration, error) { calls.Add(1); return 0, nil }
		}
		defer run(t, s, discard,
			Controller{Name: "test.Quiet", Inputs: []Input{{Type: pods.Type(), Quiet: true}}, Reconcile: count(&quiet)},
			Controller{Name: "test.Leisurely", Inputs: []Input{{Type: pods.Type()}}, Leisurely: true, Reconcile: count(&leisurely)})()
		pass(time.Minute)
		must(t, pods.Put(s.As("w"), "a", podSpec{}))
		pass(leisure / 2)
		if quiet.Load() != 1 || leisurely.Load() != 1 {
			t.Errorf("at once: %d and %d calls", quiet.Load(), leisurely.Load())
		}
		pass(leisure)
		if quiet.Load() != 1 || leisurely.Load() != 2 {
			t.Errorf("after a moment: %d and %d calls", quiet.Load(), leisurely.Load())
		}
	})
}

// A question to others ends with a change of the inputs, also with one from before the question, and the change is a
// call of its own.
func TestAQuestionEndsWithAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		var seen []int // how many pods there are, in each call
		early := false
		stop := run(t, s, discard, Controller{Name: "test.C", Inputs: []Input{{Type: pods.Type()}}, Reconcile: func(ctx context.Context, v View) (time.Duration, error) {
			seen = append(seen, len(pods.List(v)))
			if !early {
				early = true
				must(t, pods.Put(s.As("w"), "early", podSpec{}))
			}
			asking, stop := v.Unchanged(ctx)
			defer stop()
			<-asking.Done()
			return 0, nil
		}})
		pass(time.Hour)
		if !slices.Equal(seen, []int{0, 1}) {
			t.Errorf("calls with %v pods before the change", seen)
		}
		must(t, pods.Put(s.As("w"), "late", podSpec{}))
		synctest.Wait()
		if !slices.Equal(seen, []int{0, 1, 2}) {
			t.Errorf("calls with %v pods after the change", seen)
		}
		stop()
	})
}

func TestViewRefusesWhatIsNotDeclared(t *testing.T) {
	s := NewStore()
	must(t, configs.Put(s.As("w"), "node", &podSpec{}))
	v := newView(s, Controller{
		Name: "test.C", Inputs: []Input{{Type: configs.Type(), ID: "node"}}, Outputs: []string{statuses.Type()},
	}, discard, nil)
	_, getUndeclared := pods.Get(v, "a")
	_, getOtherID := configs.Get(v, "other")
	refused := map[string]error{
		"controller test.C reads TestPods.test.garboard.dev a":           getUndeclared,
		"controller test.C reads TestConfigs.test.garboard.dev other":    getOtherID,
		"controller test.C writes TestConfigs.test.garboard.dev":         configs.Put(v, "node", nil),
		"controller test.C writes TestPods.test.garboard.dev":            pods.Delete(v, "a"),
		"controller test.C reads TestConfigs.test.garboard.dev other ":   configs.AddFinalizer(v, "other", "x"),
		"controller test.C writes TestPods.test.garboard.dev ":           pods.Put(v, "a", podSpec{}),
		"controller test.C reads TestConfigs.test.garboard.dev (panics)": listPanics(func() { configs.List(v) }),
	}
	for want, err := range refused {
		want, _, _ = strings.Cut(want, " (")
		if !errors.Is(err, ErrUndeclared) || !strings.Contains(err.Error(), strings.TrimSpace(want)) {
			t.Errorf("want %q, got: %v", want, err)
		}
	}
	if _, err := configs.Get(v, "node"); err != nil {
		t.Error(err)
	}
	must(t, configs.AddFinalizer(v, "node", "test.C"))
	must(t, statuses.Put(v, "a", true))
	if n := len(statuses.List(v)); n != 1 {
		t.Errorf("%d of its own", n)
	}
}

func listPanics(f func()) (err error) {
	defer func() { err, _ = recover().(error) }()
	f()
	return nil
}

func TestNewRuntimeNamesWhatIsWrong(t *testing.T) {
	_, err := NewRuntime(NewStore(), discard,
		Controller{Name: "test.A", Outputs: []string{pods.Type()}},
		Controller{Name: "test.B", Outputs: []string{pods.Type()}},
		Controller{Name: "test.C", Inputs: []Input{{Type: "Typos.test.garboard.dev"}}, Outputs: []string{"typo"}},
		Controller{Name: "test.C"},
	)
	for _, want := range []string{
		"TestPods.test.garboard.dev has two writers: test.A and test.B",
		"controller test.C reads Typos.test.garboard.dev, which is not defined",
		"controller test.C writes typo, which is not defined",
		"controller test.C is there twice",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q isn't in: %v", want, err)
		}
	}
}

func TestGraphIsPrinted(t *testing.T) {
	rt, err := NewRuntime(NewStore(), discard,
		Controller{Name: "test.B", Inputs: []Input{{Type: pods.Type()}}, Outputs: []string{statuses.Type()}},
		Controller{Name: "test.A", Inputs: []Input{{Type: configs.Type(), ID: "node"}}, Outputs: []string{pods.Type()}},
	)
	must(t, err)
	var out strings.Builder
	must(t, rt.Graph(&out))
	const want = `digraph controllers {
  rankdir=LR;
  "test.A" [shape=box];
  "test.B" [shape=box];
  "TestConfigs.test.garboard.dev" [shape=note];
  "TestPodStatus.test.garboard.dev" [shape=note];
  "TestPods.test.garboard.dev" [shape=note];
  "TestConfigs.test.garboard.dev" -> "test.A" [label="node"];
  "test.A" -> "TestPods.test.garboard.dev";
  "TestPods.test.garboard.dev" -> "test.B";
  "test.B" -> "TestPodStatus.test.garboard.dev";
}
`
	if out.String() != want {
		t.Errorf("graph:\n%s", out.String())
	}
}

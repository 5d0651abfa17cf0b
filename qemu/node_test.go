package qemu

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// switched is a provisioner whose nodes run until the test ends them.
type switched struct {
	stuck bool // a start doesn't end by itself

	mu   sync.Mutex // guards runs
	runs []*switchedRun
}

func (p *switched) Start(ctx context.Context, _ Node) (running, error) {
	if p.stuck {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &switchedRun{ended: make(chan struct{})}
	p.runs = append(p.runs, r)
	return r, nil
}

func (p *switched) Close() error { return nil }

// last is the latest run, and the number of runs.
func (p *switched) last() (*switchedRun, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.runs[len(p.runs)-1], len(p.runs)
}

type switchedRun struct {
	once  sync.Once
	end   exit.Reason
	ended chan struct{}
}

func (r *switchedRun) finish(end exit.Reason)             { r.once.Do(func() { r.end = end; close(r.ended) }) }
func (r *switchedRun) Wait() (exit.Reason, error)         { <-r.ended; return r.end, nil }
func (r *switchedRun) PowerOff(context.Context) error     { r.finish(exit.Off); return nil }
func (r *switchedRun) Cut()                               { r.finish(exit.Killed) }
func (r *switchedRun) Interrupt(context.Context) error    { return nil }
func (r *switchedRun) Freeze(context.Context, bool) error { return nil }

// slowLog is a log on a busy disk: the end of a node is written late.
type slowLog struct{ delay time.Duration }

func (l slowLog) Write(line []byte) (int, error) {
	if strings.Contains(string(line), "node ended") {
		<-time.After(l.delay)
	}
	return len(line), nil
}

func switchedNode(t *testing.T, log io.Writer, pause time.Duration) (*node, *switched) {
	p := &switched{}
	n := &node{Node: Node{Name: "n"}, log: slog.New(slog.NewTextHandler(log, nil)), provisioner: p, pause: pause,
		quit: make(chan struct{}), wake: make(chan struct{}, 1)}
	if err := n.start(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	n.done.Go(n.supervise)
	t.Cleanup(func() { n.shutdown(0) })
	return n, p
}

// A power cut, and power on at once: the node runs, even if its end is noticed late.
func TestOnRightAfterCut(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*node) error{
		"cut": (*node).cut,
		"off": func(n *node) error { return n.powerOff(time.Minute) },
	} {
		n, p := switchedNode(t, slowLog{100 * time.Millisecond}, restartWait)
		if err := end(n); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := n.turnOn(t.Context()); err != nil {
			t.Fatalf("%s, then on: %v", name, err)
		}
		if _, runs := p.last(); runs != 2 {
			t.Errorf("%s, then on: the node is %q", name, n.status().State)
		}
	}
}

// A node that is being ended refuses to be turned on. Otherwise a cluster that
// is made again during its interrupted removal would have no nodes.
func TestOnWhileItStops(t *testing.T) {
	t.Parallel()
	n, _ := switchedNode(t, io.Discard, restartWait)
	h := &hostProcess{nodes: []*node{n}, stop: make(chan struct{})}
	on := func() *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.control().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/nodes/n/on", nil))
		return w
	}
	if w := on(); w.Code != http.StatusOK {
		t.Errorf("a node that runs: %d %s", w.Code, w.Body)
	}
	w := httptest.NewRecorder()
	h.control().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/stop?budget=0s", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("stop: %d %s", w.Code, w.Body)
	}
	if w := on(); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), errStopping.Error()) {
		t.Errorf("one that is about to end: %d %s", w.Code, w.Body)
	}
	if s := n.status().State; s != stateRunning {
		t.Errorf("the node is %q already", s)
	}
}

// To turn on a running node does nothing, now or later: a node that reboots
// starts only once.
func TestRebootAfterOn(t *testing.T) {
	t.Parallel()
	n, p := switchedNode(t, io.Discard, restartWait)
	if err := n.turnOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, _ := p.last()
	first.finish(exit.Reboot)
	eventually.That(t, 10*restartWait, "the node has started again", func() error {
		if _, runs := p.last(); runs != 2 || n.status().State != stateRunning {
			return errors.New("it is " + n.status().State)
		}
		return nil
	})
	if s := n.status(); s.Restarts != 1 || s.State != stateRunning {
		t.Errorf("after the reboot: %+v", s)
	}
}

// A node that fails repeatedly can be turned off between two starts, and stays
// off until it is turned on.
func TestOffBetweenStarts(t *testing.T) {
	t.Parallel()
	n, p := switchedNode(t, io.Discard, time.Hour)
	first, _ := p.last()
	first.finish(exit.Died)
	eventually.That(t, 10*time.Second, "the node waits", func() error {
		if s := n.status(); s.State != stateWaiting {
			return errors.New("it is " + s.State)
		}
		return nil
	})
	if err := n.powerOff(time.Minute); err != nil {
		t.Fatalf("off: %v", err)
	}
	if err := n.start(t.Context(), true); err != nil { // as at the end of its pause
		t.Fatal(err)
	}
	if s := n.status(); s.State != exit.Off.String() {
		t.Errorf("it is %q, and was turned off", s.State)
	}
	if err := n.turnOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, runs := p.last(); runs != 2 {
		t.Errorf("%d runs after it was turned on again", runs)
	}
}

// The state of a node with a slow start can be read meanwhile, and the start has a time limit.
func TestStuckStart(t *testing.T) {
	t.Parallel()
	n := &node{Node: Node{Name: "n"}, log: slog.New(slog.NewTextHandler(io.Discard, nil)), provisioner: &switched{stuck: true}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan error, 1)
	go func() { started <- n.start(ctx, false) }()
	eventually.That(t, startBudget/2, "it is starting", func() error {
		looked := make(chan string, 1)
		go func() { looked <- n.status().State }()
		select {
		case state := <-looked:
			if state != stateStarting {
				return errors.New("it is " + state)
			}
			return nil
		case <-time.After(startBudget / 4):
			return errors.New("nobody says how it is")
		}
	})
	cancel()
	if err := <-started; !errors.Is(err, context.Canceled) {
		t.Errorf("start: %v", err)
	}
	if s := n.status(); s.State != exit.Failed.String() || s.Error != context.Canceled.Error() {
		t.Errorf("afterwards it is %q, with %q", s.State, s.Error)
	}
}

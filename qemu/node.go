package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/network"
)

// A node is one machine in the host process, with a switch: on or off.
//
//	         start                 ended: reboot, died
//	off ───────────────► running ──────────────────────► waiting ─► running …
//	 ▲                      │
//	 └──────────────────────┘ powered off, power cut, failed
type node struct {
	Node
	log         *slog.Logger
	provisioner provisioner
	pause       time.Duration // before it starts again after its first end; more after the next ones
	quit        chan struct{} // closed when the node must not start any more
	wake        chan struct{} // the node has been turned on
	done        sync.WaitGroup

	starting sync.Mutex // held while it starts; taken before mu

	mu       sync.Mutex    // guards all below, for a moment only: status waits for it
	running  running       // nil while off
	ended    chan struct{} // closed when running has ended, and the node counts as off
	state    string
	why      error // it failed; nil otherwise
	since    time.Time
	restarts int
	stopping bool
	network  network.Conditions
}

// States of a node, as Status shows them.
const (
	stateStarting = "starting"
	stateRunning  = "running"
	stateFrozen   = "frozen"
	stateWaiting  = "waiting to start again"
)

var (
	errNotRunning = errors.New("it isn't running")
	errStopping   = errors.New("the cluster is stopping")
)

// start turns the node on. With again, it does so only if the node still waits to start
// again.
func (n *node) start(ctx context.Context, again bool) error {
	n.starting.Lock()
	defer n.starting.Unlock()
	n.mu.Lock()
	settled, stopping, now := n.running != nil || again && n.state != stateWaiting, n.stopping, n.Node
	if !settled && !stopping {
		n.set(nil, stateStarting)
	}
	n.mu.Unlock()
	if stopping {
		return errStopping
	}
	if settled {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startBudget)
	defer cancel()
	r, err := n.provisioner.Start(ctx, now)
	if err == nil {
		n.log.Info("node started")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		n.set(nil, exit.Failed.String())
		n.why = err
		return err
	}
	n.ended = make(chan struct{})
	n.set(r, stateRunning)
	return nil
}

// set must be called with the mutex held.
func (n *node) set(r running, state string) {
	n.running, n.state, n.since, n.why = r, state, time.Now(), nil
}

// supervise waits for the end of each run, and starts the node again where it has to be.
func (n *node) supervise() {
	wait := n.pause
	var due <-chan time.Time // when it starts again; nil: when it is turned on
	for {
		n.mu.Lock()
		r, began, stopping := n.running, n.since, n.stopping
		n.mu.Unlock()
		if r != nil {
			end, err := r.Wait()
			n.log.Info("node ended", "how", end, "after", time.Since(began).Round(time.Millisecond), "error", err)
			if time.Since(began) > soonEnded {
				wait = n.pause
			}
			due = nil
			if n.settle(end, err) {
				due = time.After(wait)
				wait = min(wait*2, restartMax)
			}
			continue
		}
		if stopping {
			return
		}
		select {
		case <-n.quit:
		case <-n.wake:
		case <-due:
			due = nil
			if err := n.start(context.Background(), true); err != nil {
				n.log.Error("node doesn't start", "error", err)
			}
		}
	}
}

// settle records the end of a run. Only from now on is the node off and can be turned on.
func (n *node) settle(end exit.Reason, why error) (again bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.set(nil, end.String())
	n.why = why
	if again = end == exit.Reboot || end == exit.Died; again {
		n.state = stateWaiting
		n.restarts++
	}
	close(n.ended)
	return again
}

// turnOn starts a node that is off.
func (n *node) turnOn(ctx context.Context) error {
	err := n.start(ctx, false)
	select {
	case n.wake <- struct{}{}:
	default:
	}
	return err
}

// current returns the run, and a channel that is closed once the node is off. It waits for
// a node that is starting.
func (n *node) current() (running, <-chan struct{}, error) {
	n.starting.Lock()
	defer n.starting.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running == nil {
		return nil, nil, fmt.Errorf("node %s: %w", n.Name, errNotRunning)
	}
	return n.running, n.ended, nil
}

// powerOff shuts the node down in order, and cuts its power after the budget.
func (n *node) powerOff(budget time.Duration) error {
	r, ended, err := n.current()
	if err != nil && n.stay() {
		return nil
	}
	if err != nil {
		return err
	}
	if budget > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		defer cancel()
		if err := r.PowerOff(ctx); err != nil {
			n.log.Warn("power button", "error", err)
		}
		select {
		case <-ended:
			return nil
		case <-ctx.Done():
			n.log.Warn("node didn't power off in time; power is cut", "budget", budget)
		}
	}
	r.Cut()
	<-ended
	return nil
}

// stay keeps a node off that waits to start again.
func (n *node) stay() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	waits := n.running == nil && n.state == stateWaiting
	if waits {
		n.set(nil, exit.Off.String())
	}
	return waits
}

// cut returns only when the node is off: a turnOn right after it then starts the node.
func (n *node) cut() error { return n.powerOff(0) }

func (n *node) freeze(ctx context.Context, frozen bool) error {
	r, _, err := n.current()
	if err != nil {
		return err
	}
	if err := r.Freeze(ctx, frozen); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running == r {
		n.state = stateRunning
		if frozen {
			n.state = stateFrozen
		}
	}
	return nil
}

func (n *node) interrupt(ctx context.Context) error {
	r, _, err := n.current()
	if err != nil {
		return err
	}
	if err := r.Interrupt(ctx); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	return nil
}

// shutdown ends the node. It does not start again.
func (n *node) shutdown(budget time.Duration) {
	n.starting.Lock() // a node that is starting runs afterwards, and can be stopped
	n.mu.Lock()
	n.stopping = true
	n.mu.Unlock()
	n.starting.Unlock()
	close(n.quit)
	if err := n.powerOff(budget); err != nil && !errors.Is(err, errNotRunning) {
		n.log.Error("stop node", "error", err)
	}
	n.done.Wait()
}

// NodeStatus is the state of a node, without a request to the node.
type NodeStatus struct {
	Name     string    `json:"name"`
	Address  string    `json:"address"`
	State    string    `json:"state"`
	Since    time.Time `json:"since"`
	Restarts int       `json:"restarts"`
	Network  string    `json:"network"`
	Error    string    `json:"error,omitempty"` // why it failed
}

func (n *node) status() NodeStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := NodeStatus{Name: n.Name, Address: n.Address.String(), State: n.state, Since: n.since, Restarts: n.restarts, Network: n.network.String()}
	if n.why != nil {
		s.Error = n.why.Error()
	}
	return s
}

package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
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
	quit        chan struct{} // closed when nothing shall start any more
	wake        chan struct{} // someone wants the node on
	done        sync.WaitGroup

	mu       sync.Mutex // guards all below
	running  Running    // nil while off
	state    string
	since    time.Time
	restarts int
	stopping bool
	network  Network
}

// States of a node, as Status shows them.
const (
	stateRunning = "running"
	stateFrozen  = "frozen"
	stateWaiting = "waiting to start again"
)

var (
	errNotRunning = errors.New("it isn't running")
	errStopping   = errors.New("the cluster is stopping")
)

func (n *node) start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running != nil {
		return nil
	}
	if n.stopping {
		return errStopping
	}
	r, err := n.provisioner.Start(ctx, n.Node)
	if err != nil {
		n.set(nil, EndFailed.String())
		return err
	}
	n.set(r, stateRunning)
	n.log.Info("node started")
	return nil
}

// set must be called with the mutex held.
func (n *node) set(r Running, state string) {
	n.running, n.state, n.since = r, state, time.Now()
}

// supervise follows the node's runs, from the first one that start made.
func (n *node) supervise() {
	wait := restartWait
	for {
		n.mu.Lock()
		r, began := n.running, n.since
		n.mu.Unlock()
		again := false
		if r != nil {
			end, err := r.Wait()
			again = end == EndReboot || end == EndDied
			n.log.Info("node ended", "how", end, "after", time.Since(began).Round(time.Millisecond), "error", err)
			n.mu.Lock()
			n.set(nil, end.String())
			if again {
				n.state = stateWaiting
				n.restarts++
			}
			n.mu.Unlock()
			if time.Since(began) > soonEnded {
				wait = restartWait
			}
		}
		var timer <-chan time.Time
		if again {
			timer = time.After(wait)
			wait = min(wait*2, restartMax)
		}
		select {
		case <-n.quit:
			return
		case <-timer:
			if err := n.start(context.Background()); err != nil {
				n.log.Error("node doesn't start", "error", err)
			}
		case <-n.wake:
		}
	}
}

// turnOn starts a node that is off.
func (n *node) turnOn(ctx context.Context) error {
	err := n.start(ctx)
	select {
	case n.wake <- struct{}{}:
	default:
	}
	return err
}

func (n *node) current() (Running, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running == nil {
		return nil, fmt.Errorf("node %s: %w", n.Name, errNotRunning)
	}
	return n.running, nil
}

// powerOff stops the node in order, and cuts its power after the budget.
func (n *node) powerOff(budget time.Duration) error {
	r, err := n.current()
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = r.Wait()
	}()
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

func (n *node) cut() error {
	r, err := n.current()
	if err != nil {
		return err
	}
	r.Cut()
	_, _ = r.Wait()
	return nil
}

func (n *node) freeze(ctx context.Context, frozen bool) error {
	r, err := n.current()
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

// shutdown ends the node for good.
func (n *node) shutdown(budget time.Duration) {
	n.mu.Lock()
	n.stopping = true
	n.mu.Unlock()
	close(n.quit)
	if err := n.powerOff(budget); err != nil && !errors.Is(err, errNotRunning) {
		n.log.Error("stop node", "error", err)
	}
	n.done.Wait()
}

// NodeStatus is a node as the host process sees it from outside.
type NodeStatus struct {
	Name     string    `json:"name"`
	Address  string    `json:"address"`
	State    string    `json:"state"`
	Since    time.Time `json:"since"`
	Restarts int       `json:"restarts"`
	Network  string    `json:"network"`
}

func (n *node) status() NodeStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	return NodeStatus{Name: n.Name, Address: n.Address.String(), State: n.state, Since: n.since, Restarts: n.restarts, Network: n.network.String()}
}

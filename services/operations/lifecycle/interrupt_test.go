package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
)

// heldLock is held by another node until it is given back.
type heldLock struct {
	until time.Time
	lock
}

func (k *heldLock) Take(ctx context.Context, h operation.Holder) (operation.Taken, error) {
	if time.Now().Before(k.until) {
		return nil, &operation.HeldError{Holder: operation.Holder{Node: "n2", Name: "reboot", ID: "reboot-1"}}
	}
	return k.lock.Take(ctx, h)
}

func TestInterrupt(t *testing.T) {
	noQuorum := fmt.Errorf("stop etcd member n1: %w", etcd.ErrQuorum)
	for name, c := range map[string]struct {
		stop    error
		held    time.Duration
		force   bool
		worker  bool
		done    bool
		err     string
		warning string
	}{
		"others have the quorum":          {done: true},
		"no quorum without it":            {stop: noQuorum, err: "would lose its quorum"},
		"by force":                        {stop: noQuorum, force: true, done: true, warning: "would lose its quorum"},
		"not known":                       {stop: errors.New("nobody answers"), done: true, warning: "isn't known"},
		"another node for a moment":       {held: 5 * time.Second, done: true},
		"another node for long":           {held: time.Hour, err: "node n2 is running reboot (reboot-1)"},
		"another node that is lost":       {held: time.Hour, stop: noQuorum, err: "would lose its quorum"},
		"another node for long, by force": {held: time.Hour, force: true, done: true, warning: "node n2 is running reboot"},
		"a worker":                        {stop: noQuorum, worker: true, done: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.stop = c.stop
				if c.worker {
					r.isWorker()
				}
				k := &heldLock{until: time.Now().Add(c.held)}
				done := false
				o := Options{Store: r.store, Etcd: member{r}, Lock: k}
				warning, err := o.Interrupt(t.Context(), "service etcd stop", c.force, func() error { done = true; return nil })
				if done != c.done || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
					t.Errorf("done: %t, %v", done, err)
				}
				if (warning == "") != (c.warning == "") || !strings.Contains(warning, c.warning) {
					t.Errorf("warning %q, and not %q", warning, c.warning)
				}
				// The others wait until etcd counts this member as down, or it is back.
				if held := done && !c.worker && !(c.held > time.Minute); held != k.held {
					t.Errorf("the lock is held: %t", k.held)
				}
			})
		})
	}
}

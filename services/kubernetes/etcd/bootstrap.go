package etcd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// Refusal is the reason for not doing something: it would do harm, or has no use here.
type Refusal struct{ error }

// Unwrap lets a caller distinguish the reasons.
func (r Refusal) Unwrap() error { return r.error }

func refuse(format string, args ...any) error { return Refusal{fmt.Errorf(format, args...)} }

// Begun is the cluster that was begun, or is being begun, on this node.
type Begun struct {
	Token   string // distinguishes the cluster from others
	Cluster string // the ID that etcd derives from it, in hexadecimal; empty until it runs
	Already bool   // it was requested before
}

// MayBootstrap refuses what Bootstrap would refuse. It returns the cluster that
// was begun on this node already, or nil. It changes nothing.
func (e *Etcd) MayBootstrap(ctx context.Context, given []string) (begun *Begun, err error) {
	err = e.inTurn(ctx, func() (err error) { begun, err = e.mayBootstrap(ctx, given); return err })
	return begun, err
}

// mayBootstrap is for the holder of turn.
func (e *Etcd) mayBootstrap(ctx context.Context, given []string) (*Begun, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("bootstrap: %s", why)
	}
	r, data, err := e.begun()
	if err != nil {
		return nil, err
	}
	switch {
	case r.Phase == fresh, data && r.Phase == member && r.Token != "":
		return &Begun{Token: r.Token, Cluster: r.Cluster, Already: true}, nil
	case data:
		return nil, refuse("bootstrap: %s isn't empty: %s", e.o.DataDir, resetHint)
	}
	if err := e.alone(ctx, r, given, lookTimeout, seen.begun); err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	return nil, nil
}

// Bootstrap begins a cluster on this node. It records that at once; the
// service does it as soon as it may run. The request may be repeated. Bootstrap
// refuses if the node has data of a cluster, or if a cluster runs or is being
// begun elsewhere: two beginnings would be two clusters, and no node could join
// the other one later. given are control planes that the caller knows.
func (e *Etcd) Bootstrap(ctx context.Context, given []string) (begun Begun, err error) {
	err = e.inTurn(ctx, func() error {
		e.beginning.Add(1) // until the journal says so
		defer e.beginning.Add(-1)
		already, err := e.mayBootstrap(ctx, given)
		if already != nil {
			begun = *already
		}
		if err != nil || already != nil {
			return err
		}
		defer e.wake()
		begun.Token = newToken()
		return e.write(record{Phase: fresh, Token: begun.Token})
	})
	return begun, err
}

// Begun returns the cluster that has begun on this node.
func (e *Etcd) Begun() (*Begun, error) {
	r, err := e.read()
	return &Begun{Token: r.Token, Cluster: r.Cluster}, err
}

// resetHint is what a user can do about existing data that prevents a beginning.
const resetHint = "this node is a member of a cluster, or has data of an earlier one; if that is not needed, remove it with `gbctl -n ADDRESS reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot`"

// wake ends the wait of the service, if it waits.
func (e *Etcd) wake() { sleep.Wake(e.begin) }

// alone refuses if it finds a cluster that prevents a beginning. Two nodes that
// look at the same time find each other, because each reports its beginning
// before it looks, and its caller until that is in the journal.
func (e *Etcd) alone(outer context.Context, r record, given []string, budget time.Duration, inTheWay func(seen) bool) error {
	e.beginning.Add(1)
	defer e.beginning.Add(-1)
	ctx, cancel := context.WithTimeout(outer, budget)
	defer cancel()
	found, err := e.look(ctx, r, given)
	// A search that was cancelled before all answers doesn't count.
	if err = cmp.Or(err, outer.Err()); err != nil {
		return err
	}
	found = slices.DeleteFunc(found, func(s seen) bool { return !inTheWay(s) })
	if len(found) == 0 {
		return nil
	}
	return refuse("%s", strings.Join(lists.Of(found, func(s seen) string { return s.what }), "; "))
}

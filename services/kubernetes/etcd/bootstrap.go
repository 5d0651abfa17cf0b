package etcd

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Refusal is why something isn't done: it would do harm, or makes no sense here.
type Refusal struct{ error }

// Unwrap lets a caller tell the reasons apart.
func (r Refusal) Unwrap() error { return r.error }

func refuse(format string, args ...any) error { return Refusal{fmt.Errorf(format, args...)} }

// Begun is the cluster that begins, or has begun, on this node.
type Begun struct {
	Token   string // events the cluster from others
	Cluster string // the ID that etcd has made of it, in hexadecimal; empty until it runs
	Already bool   // it had been asked for before
}

// MayBootstrap refuses where Bootstrap would. It returns the cluster that has begun on this
// node already, and nil where none has. It changes nothing.
func (e *Etcd) MayBootstrap(ctx context.Context, given []string) (*Begun, error) {
	done, err := e.take(ctx)
	if err != nil {
		return nil, fmt.Errorf("bootstrap: wait for a join that is under way: %w", err)
	}
	defer done()
	return e.mayBootstrap(ctx, given)
}

// mayBootstrap is for the holder of turn.
func (e *Etcd) mayBootstrap(ctx context.Context, given []string) (*Begun, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("bootstrap: %s", why)
	}
	r, err := e.read()
	if err != nil {
		return nil, err
	}
	data, err := e.hasData()
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

// Bootstrap begins a cluster on this node (S-213): written down at once, and done
// as soon as the service may run. It may be asked for again. It refuses where the
// node has data of a cluster, and where one lives already or is just being begun: two
// beginnings would be two clusters, and nobody could join them later. told are control
// planes that the caller knows of.
func (e *Etcd) Bootstrap(ctx context.Context, given []string) (Begun, error) {
	done, err := e.take(ctx)
	if err != nil {
		return Begun{}, fmt.Errorf("bootstrap: wait for a join that is under way: %w", err)
	}
	defer done()
	already, err := e.mayBootstrap(ctx, given)
	if err != nil {
		return Begun{}, err
	}
	if already != nil {
		return *already, nil
	}
	r := record{Phase: fresh, Token: newToken()}
	if err := e.write(r); err != nil {
		return Begun{}, err
	}
	e.wake()
	return Begun{Token: r.Token}, nil
}

// Begun returns the cluster that has begun on this node.
func (e *Etcd) Begun() (*Begun, error) {
	r, err := e.read()
	return &Begun{Token: r.Token, Cluster: r.Cluster}, err
}

// resetHint is what a person can do about data that is in the way.
const resetHint = "this node is a member of a cluster, or has data of an earlier one; if that is not needed, remove it with `gbctl reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot`"

// wake ends the pause of the service, should it wait.
func (e *Etcd) wake() {
	select {
	case e.begin <- struct{}{}:
	default: // it is awake
	}
}

// alone refuses where something is seen of a cluster that is in the way. Those that
// look at the same time see each other, as each says that it is about to begin before
// it looks.
func (e *Etcd) alone(outer context.Context, r record, given []string, budget time.Duration, inTheWay func(seen) bool) error {
	e.beginning.Add(1)
	defer e.beginning.Add(-1)
	ctx, cancel := context.WithTimeout(outer, budget)
	defer cancel()
	found, err := e.look(ctx, r, given)
	if err == nil { // who was called off before all had answered has seen nothing
		err = outer.Err()
	}
	if err != nil {
		return err
	}
	var what []string
	for _, s := range found {
		if inTheWay(s) {
			what = append(what, s.what)
		}
	}
	if len(what) > 0 {
		return refuse("%s", strings.Join(what, "; "))
	}
	return nil
}

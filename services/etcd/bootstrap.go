package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/garboard-os/garboard/services/kubernetes"
	"github.com/garboard-os/garboard/services/machine"
)

// Refusal is why something isn't done: it would do harm, or makes no sense here.
type Refusal struct{ error }

// Unwrap lets a caller tell the reasons apart.
func (r Refusal) Unwrap() error { return r.error }

func refuse(format string, args ...any) error { return Refusal{fmt.Errorf(format, args...)} }

// Begun is what Bootstrap has done.
type Begun struct {
	Token   string // tells the cluster from others
	Already bool   // it had been asked for before
}

// Bootstrap begins a cluster on this node (S-213): written down at once, and done
// as soon as the service may run. It may be asked for again. It refuses where the
// node has data of a cluster, and where one lives already: two beginnings would be
// two clusters, and nobody could join them later.
func (e *Etcd) Bootstrap(ctx context.Context) (Begun, error) {
	if why := e.o.skip(); why != "" {
		return Begun{}, refuse("bootstrap: %s", why)
	}
	done, err := e.take(ctx)
	if err != nil {
		return Begun{}, fmt.Errorf("bootstrap: wait for a join that is under way: %w", err)
	}
	defer done()
	r, err := e.read()
	if err != nil {
		return Begun{}, err
	}
	data, err := e.hasData()
	if err != nil {
		return Begun{}, err
	}
	switch {
	case r.Phase == fresh, data && r.Phase == member && r.Token != "":
		return Begun{Token: r.Token, Already: true}, nil
	case data:
		return Begun{}, refuse("bootstrap: %s isn't empty: this node is a member of a cluster, or has data of an earlier one, which a reset would remove", e.o.DataDir)
	}
	if err := e.alone(ctx); err != nil {
		return Begun{}, fmt.Errorf("bootstrap: %w", err)
	}
	r = record{Phase: fresh, Token: newToken()}
	if err := e.write(r); err != nil {
		return Begun{}, err
	}
	select {
	case e.begin <- struct{}{}:
	default: // it is awake
	}
	return Begun{Token: r.Token}, nil
}

// alone refuses where an API server answers at the cluster's endpoint, whatever it
// says: there is, or was until its etcd lost the quorum, a cluster behind it, be it
// this one or one whose secrets this node doesn't have.
func (e *Etcd) alone(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	me, err := e.o.self()
	if err != nil {
		return err
	}
	cfg, err := machine.Config(e.o.Store)
	if err != nil {
		return err
	}
	c, err := e.api()
	if err != nil {
		return err
	}
	defer c.Close()
	endpoint := cfg.Cluster.ControlPlane.Endpoint
	found, err := c.Raw(ctx, apiServers)
	var status *kubernetes.StatusError
	switch {
	case errors.As(err, &status):
		return refuse("an API server of this cluster answers at %s, with %d: the cluster has begun elsewhere; once it is well, this node joins it by itself", endpoint, status.Code)
	case unknownAuthority(err):
		return refuse("an API server of another cluster answers at %s: %s", endpoint, remedy)
	case err != nil:
		return nil
	}
	if urls := others(found, me); len(urls) > 0 {
		return refuse("the cluster lives already, with etcd at %s: this node joins it by itself", strings.Join(urls, ", "))
	}
	return refuse("an API server of this cluster answers at %s: the cluster has begun already", endpoint)
}

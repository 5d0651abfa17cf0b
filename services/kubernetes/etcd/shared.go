package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/operation"
)

const (
	// operationsKey is the prefix of the keys of shared operations. Each has its
	// record, which stays, and its coordinator, which ends with a lease.
	operationsKey  = "/garboard.dev/operations/"
	recordSuffix   = "/record"
	coordinatorKey = "/coordinator"
	// claimTTL is how long a lost node stays the coordinator: longer than an election.
	claimTTL = time.Minute
	// Steps must end claimMargin before the end of the lease, because another node
	// could take the operation over after it. They have three seconds for that.
	claimMargin = 15 * time.Second
)

// Shared are the records of operations in etcd (operation.Shared).
func (e *Etcd) Shared() operation.Shared { return records{e} }

type records struct{ e *Etcd }

// errNoRecords: a worker has no etcd.
var errNoRecords = errors.New("only control planes keep records of operations in etcd")

// Claim implements operation.Shared.
func (r records) Claim(ctx context.Context, h operation.Holder) (operation.Claim, error) {
	if r.e.o.skip() != "" {
		return nil, errNoRecords
	}
	h.Stays = claimTTL
	t, err := r.e.hold(ctx, operationsKey+h.ID+coordinatorKey, h)
	if err != nil {
		return nil, err
	}
	c := &claim{held: t, record: operationsKey + h.ID + recordSuffix, lost: make(chan struct{})}
	var life context.Context
	life, t.end = context.WithCancel(context.WithoutCancel(ctx)) // until Release
	t.keeping.Go(func() { c.watch(life) })
	return c, nil
}

// List implements operation.Shared.
func (r records) List(ctx context.Context) ([]operation.SharedRecord, error) {
	if r.e.o.skip() != "" {
		return nil, nil
	}
	c, err := r.e.voters(ctx, ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	found, err := c.Get(ctx, operationsKey, clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("read the records of operations: %w", noAnswer(err))
	}
	var all []operation.SharedRecord
	coordinators := map[string]operation.Holder{}
	for _, kv := range found.Kvs {
		rest := strings.TrimPrefix(string(kv.Key), operationsKey)
		if id, ok := strings.CutSuffix(rest, recordSuffix); ok {
			all = append(all, operation.SharedRecord{ID: id, Record: kv.Value})
		} else if id, ok := strings.CutSuffix(rest, coordinatorKey); ok {
			coordinators[id] = holder(kv.Value)
		}
	}
	for i := range all {
		if h, there := coordinators[all[i].ID]; there {
			all[i].Coordinator = &h
		}
	}
	return all, nil
}

// Delete implements operation.Shared.
func (r records) Delete(ctx context.Context, id string) error {
	c, err := r.e.voters(ctx, ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Delete(ctx, operationsKey+id+recordSuffix); err != nil {
		return fmt.Errorf("remove the record of operation %s: %w", id, noAnswer(err))
	}
	return nil
}

// claim is the role of an operation's coordinator.
type claim struct {
	*held
	record string
	lost   chan struct{}
}

// watch renews the lease until ctx ends, or until it may be lost.
func (c *claim) watch(ctx context.Context) {
	defer close(c.lost)
	alive, err := c.client.KeepAlive(ctx, c.lease)
	if err != nil {
		return
	}
	end := time.NewTimer(claimTTL - claimMargin)
	defer end.Stop()
	for {
		select {
		case _, there := <-alive:
			if !there {
				return
			}
			end.Reset(claimTTL - claimMargin)
		case <-end.C:
			return
		}
	}
}

// Node implements operation.Claim.
func (c *claim) Node() string { return c.node }

// Lost implements operation.Claim.
func (c *claim) Lost() <-chan struct{} { return c.lost }

// Read implements operation.Claim.
func (c *claim) Read(ctx context.Context) ([]byte, error) {
	found, err := c.client.Get(ctx, c.record)
	if err != nil {
		return nil, noAnswer(err)
	}
	if len(found.Kvs) == 0 {
		return nil, nil
	}
	return found.Kvs[0].Value, nil
}

// errNotCoordinator: the lease has ended, and another node may be the coordinator.
var errNotCoordinator = errors.New("this node isn't the coordinator of the operation any more")

// Write implements operation.Claim.
func (c *claim) Write(ctx context.Context, text []byte) error {
	mine := clientv3.Compare(clientv3.ModRevision(c.key), "=", c.revision)
	done, err := c.client.Txn(ctx).If(mine).Then(clientv3.OpPut(c.record, string(text))).Commit()
	if err != nil {
		return noAnswer(err)
	}
	if !done.Succeeded {
		return errNotCoordinator
	}
	return nil
}

// Release implements operation.Claim.
func (c *claim) Release(ctx context.Context) error { return c.held.Release(ctx, 0) }

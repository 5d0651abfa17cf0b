package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// lockKey is outside of the keys of Kubernetes, which are below /registry.
	lockKey = "/garboard.dev/operation"
	// lockRenewal is between two renewals of the lock's lease, or between two tries to take
	// a lock again that was lost.
	lockRenewal = 10 * time.Second
	// revokeTimeout is for a lease that nobody needs; it ends by itself else.
	revokeTimeout = 2 * time.Second
	// maxHolder limits the size of a holder's record, in bytes.
	maxHolder = 4 << 10
)

// Lock keeps control planes from disrupting the cluster at the same time: one key,
// with the holder's name, that ends with a lease. Workers need none.
func (e *Etcd) Lock() operation.Lock { return lock{e} }

type lock struct{ e *Etcd }

// held is a key of etcd that this node has, with a lease: the lock, or the role
// of an operation's coordinator.
type held struct {
	client *clientv3.Client
	key    string
	value  string        // the holder
	node   string        // this one
	stays  time.Duration // without the node
	log    *slog.Logger

	end     context.CancelFunc // ends the renewal
	keeping sync.WaitGroup

	// The following fields belong to the goroutine that keeps the lease, and then to Release.
	lease    clientv3.LeaseID
	revision int64 // of the key: with another one it belongs to another node
}

// Take implements operation.Lock.
func (k lock) Take(ctx context.Context, h operation.Holder) (operation.Taken, error) {
	if k.e.o.skip() != "" {
		return nil, nil
	}
	t, err := k.e.hold(ctx, lockKey, h)
	if err != nil {
		return nil, err
	}
	var life context.Context
	life, t.end = context.WithCancel(context.WithoutCancel(ctx)) // until Release
	t.keeping.Go(func() { t.keep(life) })
	return t, nil
}

// hold takes a key for this node. The caller keeps its lease alive.
func (e *Etcd) hold(ctx context.Context, key string, h operation.Holder) (*held, error) {
	me, err := e.o.self()
	if err != nil {
		return nil, err
	}
	h.Node = me.name
	value, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	t := &held{key: key, value: string(value), node: me.name, stays: h.Stays, log: e.o.Log}
	if t.client, err = e.voters(ctx, context.WithoutCancel(ctx)); err != nil {
		return nil, err
	}
	if err := t.take(ctx); err != nil {
		return nil, errors.Join(err, t.client.Close())
	}
	return t, nil
}

// Look implements operation.Lock.
func (k lock) Look(ctx context.Context) (*operation.Holder, error) {
	if k.e.o.skip() != "" {
		return nil, nil
	}
	me, err := k.e.o.self()
	if err != nil {
		return nil, err
	}
	c, err := k.e.voters(ctx, ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	found, err := c.Get(ctx, lockKey)
	if err != nil {
		return nil, noAnswer(err)
	}
	if len(found.Kvs) == 0 {
		return nil, nil
	}
	if h := holder(found.Kvs[0].Value); h.Node != me.name {
		return &h, nil
	}
	return nil, nil
}

// voters is a client, valid as long as life, of this node's member and of all
// others that it knows: an operation may end this node's own. If that doesn't
// run, the journal has the addresses of the others.
func (e *Etcd) voters(ctx, life context.Context) (*clientv3.Client, error) {
	me, err := e.o.self()
	r, unread := e.read()
	if err = cmp.Or(err, unread); err != nil {
		return nil, err
	}
	own := clientURL(me.addr)
	c, err := Dial(life, e.o.Store, append([]string{own}, r.Peers...)...)
	if err != nil {
		return nil, err
	}
	found, err := list(ctx, c, clientv3.WithSerializable())
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	urls := []string{own, loopbackURL} // the address may change meanwhile
	for _, m := range found.Members {
		if !m.IsLearner {
			urls = append(urls, m.ClientURLs...)
		}
	}
	slices.Sort(urls)
	c.SetEndpoints(slices.Compact(urls)...)
	return c, nil
}

// noAnswer explains a deadline error.
func noAnswer(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("etcd doesn't answer, or has no quorum: %w", err)
	}
	return err
}

// holder is the recorded holder of the lock. An unreadable record also counts as one.
func holder(value []byte) (h operation.Holder) {
	if len(value) > maxHolder || json.Unmarshal(value, &h) != nil {
		return operation.Holder{Node: "unknown", Name: "an operation", ID: "unknown"}
	}
	return h
}

// take takes the key with a new lease, or again if this node has it.
func (t *held) take(ctx context.Context) error {
	granted, err := t.client.Grant(ctx, int64(t.stays/time.Second))
	if err != nil {
		return noAnswer(err)
	}
	put := clientv3.OpPut(t.key, t.value, clientv3.WithLease(granted.ID))
	revision := int64(0) // the key doesn't exist
	for {
		unchanged := clientv3.Compare(clientv3.ModRevision(t.key), "=", revision)
		got, err := t.client.Txn(ctx).If(unchanged).Then(put).Else(clientv3.OpGet(t.key)).Commit()
		if err != nil { // it may have been done all the same
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), revokeTimeout)
			_, _ = t.client.Revoke(rctx, granted.ID) // otherwise the lease ends by itself
			cancel()
			return noAnswer(err)
		}
		if got.Succeeded {
			t.lease, t.revision = granted.ID, got.Header.Revision
			return nil
		}
		kvs := got.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 { // it was deleted in between
			revision = 0
			continue
		}
		if h := holder(kvs[0].Value); h.Node != t.node {
			_, _ = t.client.Revoke(ctx, granted.ID) // otherwise it expires
			return &operation.HeldError{Holder: h}
		}
		revision = kvs[0].ModRevision
	}
}

// keep renews the lease until ctx ends. A lease that is gone, because the cluster had
// no quorum for too long or another history, is taken again unless another node was faster.
func (t *held) keep(ctx context.Context) {
	for sleep.For(ctx, lockRenewal) {
		rctx, cancel := context.WithTimeout(ctx, requestTimeout)
		_, err := t.client.KeepAliveOnce(rctx, t.lease)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			err = t.take(rctx)
		}
		cancel()
		if other := new(operation.HeldError); errors.As(err, &other) {
			t.log.Warn("the lock of the cluster ended while etcd didn't answer, and another node has it now: both run disruptive operations", "holder", other.Holder.String())
			return
		}
	}
}

// Release implements operation.Taken. If etcd doesn't answer in time, as when it has no quorum, it goes on in the
// background: nobody is to wait for an operation that has ended.
func (t *held) Release(ctx context.Context, after time.Duration) error {
	t.end()
	t.keeping.Wait()
	err := t.release(ctx, after)
	if err == nil {
		return t.client.Close()
	}
	t.keeping.Go(func() {
		defer t.client.Close()
		life, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.stays)
		defer cancel()
		for sleep.For(life, healthPeriod) { // connections from a former address end one after another
			rctx, cancel := context.WithTimeout(life, requestTimeout)
			err := t.release(rctx, after)
			cancel()
			if err == nil {
				return
			}
		}
	})
	return err
}

// release gives the key back, unless another hold of it has begun.
func (t *held) release(ctx context.Context, after time.Duration) error {
	then := clientv3.OpDelete(t.key)
	if after > 0 {
		longer, err := t.client.Grant(ctx, int64(after/time.Second))
		if err != nil {
			return noAnswer(err)
		}
		then = clientv3.OpPut(t.key, t.value, clientv3.WithLease(longer.ID))
	}
	mine := clientv3.Compare(clientv3.ModRevision(t.key), "=", t.revision)
	if _, err := t.client.Txn(ctx).If(mine).Then(then).Commit(); err != nil {
		return noAnswer(err)
	}
	if _, err := t.client.Revoke(ctx, t.lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return noAnswer(err)
	}
	return nil
}

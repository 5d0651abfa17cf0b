package vip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
)

const (
	// candidateTTL is the TTL of a candidate's lease, in seconds. A slow disk delays
	// a keepalive in etcd by two or three seconds, and the address must not move for
	// that. The next in the queue detects earlier that a holder is gone or frozen;
	// the TTL is for the other candidates, and for nodes without a link between them.
	candidateTTL = 5
	// askEvery is how often etcd is queried for the holder, in addition to the
	// watch; askTimeout is for one answer.
	askEvery   = time.Second
	askTimeout = time.Second
	// againAfter is the pause after etcd couldn't be reached at all, and after a panic.
	againAfter = time.Second
	// returnWithin is how long a holder has to enter the queue again after it lost its place
	// without an eviction: a leader of etcd that was frozen ends all leases as expired when
	// it is back, also those of live candidates. A holder without a watch notices within
	// askEvery, and has askEvery to enter again; the next query comes just after that.
	returnWithin = 2*askEvery - askEvery/10

	keyPrefix  = "/garboard.dev/shared-address/"
	holders    = "/holder"      // the node that has the address, until it leaves or is evicted
	candidates = "/candidates/" // one key per candidate, bound to its lease
	nodes      = "/nodes/"      // one key per node that ever was a candidate, without a lease
)

// node is a control plane that shares the address, as it is stored in etcd.
type node struct {
	Name    string     `json:"name"`
	Address netip.Addr `json:"address"`
	MAC     string     `json:"mac"` // of the link with the shared address
}

// view is the state of the election, as etcd returned it.
type view struct {
	askedAt time.Time
	holder  node
	held    bool             // there is a holder
	mine    bool             // this node is the holder
	own     bool             // this node is a candidate
	next    bool             // this node is the next in the queue after the holder
	lease   clientv3.LeaseID // the holder's
	named   int64            // the revision at which the holder was written; 0: there is none
	others  int              // candidates beside this node
	nodes   []node
	// revision is etcd's. It goes back when etcd is restored from a snapshot.
	revision int64
}

// election is this node's part in the election for one address. etcd has a queue of
// candidates. Each has a place with a lease, and loses it without keepalives. The holder
// is in the queue, too, and has a key of its own: if it loses its place and enters again
// at once, it still is the holder. Without a holder, the first in the queue becomes it.
//
//	run ── candidate ──▶ lease, own MAC in nodes/, key in candidates/ ── no holder, first in the queue ──▶ holder, mine
//	           ◀── no candidate: key, lease and holder are deleted; etcd has ended the lease: to the end of the queue
type election struct {
	store   *resource.Store
	key     string // of the address
	onView  func(view)
	onError func(error) // nil: the last request to etcd succeeded

	self      atomic.Pointer[node] // nil: not a candidate
	change    chan struct{}        // has one element after self changed
	evictions chan view            // evict the holder of this view

	missing time.Time // for run only: since when the holder isn't in the queue; zero: it is in it
}

func newElection(store *resource.Store, address netip.Addr, onView func(view), onError func(error)) *election {
	return &election{store: store, key: keyPrefix + address.String(), onView: onView, onError: onError, change: make(chan struct{}, 1), evictions: make(chan view, 1)}
}

// setCandidate makes this node a candidate, as self; nil ends its candidacy.
func (e *election) setCandidate(self *node) {
	old := e.self.Swap(self)
	if old == self || old != nil && self != nil && *old == *self {
		return
	}
	sleep.Wake(e.change)
}

// run takes part in the election until ctx ends. Then this node isn't a candidate.
func (e *election) run(ctx context.Context) {
	for range sleep.Every(ctx, againAfter) {
		e.onError(e.session(ctx))
	}
}

// session is the part in the election with one client.
func (e *election) session(ctx context.Context) error {
	client, err := e.dial()
	if err != nil {
		return err
	}
	defer client.Close()
	lease := clientv3.LeaseID(clientv3.NoLease)
	var as node
	leave := func() {
		if lease != clientv3.NoLease {
			e.leave(client, lease, as)
			lease = clientv3.NoLease
		}
	}
	defer leave()
	changes, unwatch := e.watch(ctx, client)
	defer func() { unwatch() }()
	revision := int64(0)
	e.missing = time.Time{}
	for {
		self := e.self.Load()
		if self == nil || *self != as {
			leave()
		}
		if lease != clientv3.NoLease {
			e.onError(e.renew(ctx, client, lease))
		} else if self != nil {
			if lease, err = e.enter(ctx, client, *self); err != nil {
				return err
			}
			as = *self
		}
		w, err := e.ask(ctx, client, lease)
		if err == nil {
			e.onView(w)
			if w.revision < revision {
				changes = nil // etcd was restored: the watch would wait for a much later revision
			}
			revision = w.revision
		}
		e.onError(err)
		if err == nil && lease != clientv3.NoLease && !w.own {
			e.revoke(client, lease)
			lease = clientv3.NoLease
			continue // to the end of the queue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-e.change:
		case holder := <-e.evictions:
			e.onError(e.evict(ctx, client, holder))
		case _, open := <-changes:
			if !open { // without a leader a watch ends
				changes = nil
			}
		case <-time.After(askEvery):
			if changes == nil && err == nil {
				unwatch()
				changes, unwatch = e.watch(ctx, client)
			}
		}
	}
}

// watch watches the election's keys until etcd has no leader.
func (e *election) watch(ctx context.Context, client *clientv3.Client) (clientv3.WatchChan, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	return client.Watch(clientv3.WithRequireLeader(ctx), e.key+"/", clientv3.WithPrefix()), cancel
}

// dial makes a client only for this node's own member: if that has no quorum, the
// node can't take part in the election, and its API server couldn't work either.
func (e *election) dial() (*clientv3.Client, error) {
	status, err := etcd.Statuses.Get(e.store, etcd.StatusID)
	if err != nil {
		return nil, err
	}
	return etcd.Dial(context.Background(), e.store, status.Spec.Endpoint)
}

// place is the key of a candidate.
func (e *election) place(lease clientv3.LeaseID) string {
	return fmt.Sprintf("%s%s%016x", e.key, candidates, lease)
}

// enter puts this node at the end of the queue.
func (e *election) enter(ctx context.Context, client *clientv3.Client, self node) (clientv3.LeaseID, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*askTimeout)
	defer cancel()
	text, err := json.Marshal(self)
	if err != nil {
		return clientv3.NoLease, err
	}
	lease, err := client.Grant(ctx, candidateTTL)
	if err != nil {
		return clientv3.NoLease, fmt.Errorf("lease of etcd: %w", err)
	}
	_, err = client.Txn(ctx).Then(
		clientv3.OpPut(e.key+nodes+self.Name, string(text)),
		clientv3.OpPut(e.place(lease.ID), string(text), clientv3.WithLease(lease.ID)),
	).Commit()
	if err != nil {
		e.revoke(client, lease.ID)
		return clientv3.NoLease, fmt.Errorf("be a candidate in etcd: %w", err)
	}
	return lease.ID, nil
}

// renew sends one keepalive, over a stream of its own. The client's own method,
// one stream for all, blocks for seven seconds if the member was about to
// forward a keepalive to a leader that is gone: a lease would be lost although
// there is another leader.
func (e *election) renew(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	stream, err := pb.NewLeaseClient(client.ActiveConnection()).LeaseKeepAlive(ctx)
	if err == nil {
		err = stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(lease)})
	}
	if err == nil {
		_, err = stream.Recv() // the queue shows whether the lease still exists
	}
	if err != nil {
		return fmt.Errorf("renew the lease of etcd: %w", err)
	}
	return nil
}

// leave removes this node from the queue and as the holder, so that another one can be
// elected at once.
func (e *election) leave(client *clientv3.Client, lease clientv3.LeaseID, as node) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	text, err := json.Marshal(as)
	if err == nil {
		holder, own := e.key+holders, clientv3.OpDelete(e.place(lease))
		_, err = client.Txn(ctx).If(
			clientv3.Compare(clientv3.Value(holder), "=", string(text)),
		).Then(clientv3.OpDelete(holder), own).Else(own).Commit()
	}
	if err != nil {
		e.onError(fmt.Errorf("leave the queue in etcd: %w", err))
	}
	e.revoke(client, lease)
}

// revoke ends a lease. If etcd doesn't answer, the lease expires.
func (e *election) revoke(client *clientv3.Client, lease clientv3.LeaseID) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	if _, err := client.Revoke(ctx, lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		e.onError(fmt.Errorf("end a lease of etcd: %w", err))
	}
}

// evict removes a holder that is gone, if w is still true: the holder has the same place
// in the queue, and no other one was written since. A holder that isn't gone notices, and
// enters the end of the queue.
func (e *election) evict(ctx context.Context, client *clientv3.Client, w view) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	holder, place := e.key+holders, e.place(w.lease)
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.ModRevision(holder), "=", w.named),
		clientv3.Compare(clientv3.CreateRevision(place), ">", 0),
	).Then(clientv3.OpDelete(holder), clientv3.OpDelete(place)).Commit()
	if err != nil {
		return fmt.Errorf("take the holder's place in the queue of etcd away: %w", err)
	}
	if done.Succeeded {
		e.revoke(client, w.lease)
	}
	return nil
}

// ask returns the quorum's view: a linearizable read, because a member that was
// cut off may have old data.
func (e *election) ask(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID) (view, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	askedAt := time.Now()
	got, err := client.Get(ctx, e.key+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		e.missing = time.Time{} // the holder may have had no answer either
		return view{}, fmt.Errorf("ask etcd for the holder of the address: %w", err)
	}
	w, unnamed, err := e.read(got, lease, askedAt)
	if err == nil && unnamed {
		err = e.take(ctx, client, &w)
	}
	return w, err
}

// read parses etcd's answer; unnamed: this node has to be the holder, and isn't
// recorded as such yet.
func (e *election) read(got *clientv3.GetResponse, lease clientv3.LeaseID, askedAt time.Time) (w view, unnamed bool, err error) {
	w = view{askedAt: askedAt, revision: got.Header.Revision}
	var queue []place
	var holder node
	for _, kv := range got.Kvs {
		var n node
		if err := json.Unmarshal(kv.Value, &n); err != nil {
			return w, false, fmt.Errorf("key %s in etcd: %w", kv.Key, err)
		}
		switch key := string(kv.Key); {
		case key == e.key+holders:
			holder, w.named = n, kv.ModRevision
		case strings.HasPrefix(key, e.key+nodes):
			w.nodes = append(w.nodes, n)
		case strings.HasPrefix(key, e.key+candidates):
			queue = append(queue, place{n, clientv3.LeaseID(kv.Lease)})
		}
	}
	w.count(queue, e.first(queue, holder, lease, askedAt), lease)
	return w, w.mine && w.holder != holder, nil
}

// place is a candidate's place in the queue.
type place struct {
	node
	lease clientv3.LeaseID
}

// first is the index of the holder, or of the candidate that has to become it;
// -1: there is none.
func (e *election) first(queue []place, holder node, lease clientv3.LeaseID, now time.Time) int {
	at := slices.IndexFunc(queue, func(p place) bool { return p.node == holder && p.lease == lease })
	if at < 0 { // another node, which after a restart may be in the queue twice
		at = slices.IndexFunc(queue, func(p place) bool { return p.node == holder })
	}
	switch {
	case at >= 0 || holder == node{} || len(queue) == 0:
		e.missing = time.Time{}
	case e.missing.IsZero():
		e.missing = now
	}
	switch {
	case at >= 0:
		return at
	case len(queue) == 0 || !e.missing.IsZero() && now.Sub(e.missing) < returnWithin:
		return -1
	}
	return 0
}

// count fills in what follows from the queue. A node that was restarted may be
// in it twice, until its old lease ends.
func (w *view) count(queue []place, first int, lease clientv3.LeaseID) {
	if first >= 0 {
		w.held, w.holder, w.lease = true, queue[first].node, queue[first].lease
	}
	var self node
	if own := slices.IndexFunc(queue, func(p place) bool { return p.lease == lease }); own >= 0 {
		w.own, w.mine, self = true, own == first, queue[own].node
	}
	next := slices.IndexFunc(queue, func(p place) bool { return p.node != w.holder })
	w.next = w.own && w.held && !w.mine && next >= 0 && queue[next].node == self
	others := map[node]bool{}
	for _, p := range queue {
		if p.node != self {
			others[p.node] = true
		}
	}
	w.others = len(others)
}

// take writes this node as the holder, unless another one was written meanwhile, or a
// candidate has entered the queue that may be the missing holder.
func (e *election) take(ctx context.Context, client *clientv3.Client, w *view) error {
	text, err := json.Marshal(w.holder)
	if err != nil {
		return err
	}
	key := e.key + holders
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.ModRevision(key), "=", w.named),
		clientv3.Compare(clientv3.CreateRevision(e.place(w.lease)), ">", 0),
		clientv3.Compare(clientv3.CreateRevision(e.key+candidates), "<", w.revision+1).WithPrefix(),
	).Then(clientv3.OpPut(key, string(text))).Commit()
	if err != nil {
		return fmt.Errorf("be the holder in etcd: %w", err)
	}
	if !done.Succeeded { // the watch reports the change
		w.held, w.mine = false, false
	}
	return nil
}

// nodeByMAC returns the name of the control plane with this MAC address.
func (w view) nodeByMAC(mac net.HardwareAddr) (name string, ok bool) {
	for _, n := range w.nodes {
		if n.MAC == mac.String() {
			return n.Name, true
		}
	}
	return "", false
}

package vip

import (
	"context"
	"crypto/tls"
	"crypto/x509"
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
	"go.uber.org/zap"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// candidateTTL is how long, in seconds, etcd waits for a candidate that is silent. A
	// slow disk keeps etcd from hearing a sign of life for two or three seconds, and the
	// address isn't to move for that. A holder that is gone or frozen is noticed by the
	// next in the queue before; this is for the others, and for where there is no link
	// between the two.
	candidateTTL = 5
	// askEvery is how often etcd is asked who holds the address, whether it has told of
	// a change or not; askTimeout how long one answer may take.
	askEvery   = time.Second
	askTimeout = time.Second
	// againAfter is the pause after etcd couldn't be reached at all, and after a panic.
	againAfter = time.Second
	// returnWithin is how long a holder has, whose place in the queue is lost though nobody
	// took it away, to be there again: a leader of etcd that was frozen ends all leases for
	// expired when it is back, those of living candidates too. One that no watch tells asks
	// within askEvery, and has as long again for going back; etcd is asked just after that.
	returnWithin = 2*askEvery - askEvery/10

	keyPrefix  = "/garboard.dev/shared-address/"
	holders    = "/holder"      // who has it, until it leaves or is put out
	candidates = "/candidates/" // one key per candidate, which goes with its lease
	nodes      = "/nodes/"      // one key per node that ever was one, which stays
)

// node is a control plane that shares the address, as etcd knows it.
type node struct {
	Name    string     `json:"name"`
	Address netip.Addr `json:"address"`
	MAC     string     `json:"mac"` // of the link with the shared address
}

// view is what etcd said.
type view struct {
	asked  time.Time
	holder node
	held   bool             // somebody is the holder
	mine   bool             // this node is
	own    bool             // this node is a candidate
	next   bool             // this node is the next in the queue after the holder
	lease  clientv3.LeaseID // the holder's
	named  int64            // the revision at which a holder was named; 0: none is
	others int              // candidates beside this node
	nodes  []node
	// revision is etcd's. It goes back when etcd is restored from a snapshot.
	revision int64
}

// election is this node's part in the election for one address. etcd has a queue of
// candidates. Each is in it with a lease, so that one that is silent falls out. The
// holder is in the queue, too, and named beside it: where it lost its place but comes
// back at once, it still is the holder. Without one, the first in the queue is.
//
//	run ── wanted ──▶ lease, own MAC in nodes/, key in candidates/ ── no holder, first in the queue ──▶ holder, mine
//	           ◀── not wanted: key, lease and holder go; etcd has ended the lease: to the end of the queue
type election struct {
	store *resource.Store
	key   string // of the address
	tell  func(view)
	trace func(error) // why etcd gave no view; nil: it did

	self   atomic.Pointer[node] // nil: not a candidate
	change chan struct{}        // has one element after self changed
	out    chan view            // whose holder is to be put out

	missing time.Time // run's own: since when the holder isn't in the queue, as etcd says again and again; zero: it is
}

func newElection(store *resource.Store, address netip.Addr, tell func(view), trace func(error)) *election {
	return &election{store: store, key: keyPrefix + address.String(), tell: tell, trace: trace, change: make(chan struct{}, 1), out: make(chan view, 1)}
}

// want makes this node a candidate, as self, or with nil none.
func (c *election) want(self *node) {
	old := c.self.Swap(self)
	if old == self || old != nil && self != nil && *old == *self {
		return
	}
	select {
	case c.change <- struct{}{}:
	default:
	}
}

// run goes on until ctx ends. Then this node is no candidate any more.
func (c *election) run(ctx context.Context) {
	for ctx.Err() == nil {
		c.trace(c.session(ctx))
		select {
		case <-ctx.Done():
		case <-time.After(againAfter):
		}
	}
}

// session is the part in the election with one client.
func (c *election) session(ctx context.Context) error {
	client, err := c.dial()
	if err != nil {
		return err
	}
	defer client.Close()
	lease := clientv3.LeaseID(clientv3.NoLease)
	var as node
	leave := func() {
		if lease != clientv3.NoLease {
			c.leave(client, lease, as)
			lease = clientv3.NoLease
		}
	}
	defer leave()
	changes, unwatch := c.watch(ctx, client)
	defer func() { unwatch() }()
	revision := int64(0)
	c.missing = time.Time{}
	for {
		self := c.self.Load()
		if self == nil || *self != as {
			leave()
		}
		if lease != clientv3.NoLease {
			c.trace(c.renew(ctx, client, lease))
		} else if self != nil {
			if lease, err = c.enter(ctx, client, *self); err != nil {
				return err
			}
			as = *self
		}
		w, err := c.ask(ctx, client, lease)
		if err == nil {
			c.tell(w)
			if w.revision < revision {
				changes = nil // it would wait for a revision that is long to come
			}
			revision = w.revision
		}
		c.trace(err)
		if err == nil && lease != clientv3.NoLease && !w.own {
			c.revoke(client, lease)
			lease = clientv3.NoLease
			continue // to the end of the queue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.change:
		case gone := <-c.out:
			c.trace(c.evict(ctx, client, gone))
		case _, open := <-changes:
			if !open { // without a leader nothing is watched
				changes = nil
			}
		case <-time.After(askEvery):
			if changes == nil && err == nil {
				unwatch()
				changes, unwatch = c.watch(ctx, client)
			}
		}
	}
}

// watch is told of changes, until there is no leader.
func (c *election) watch(ctx context.Context, client *clientv3.Client) (clientv3.WatchChan, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	return client.Watch(clientv3.WithRequireLeader(ctx), c.key+"/", clientv3.WithPrefix()), cancel
}

// dial makes a client of this node's own member: who can't reach the others from
// there has no part in the election, as its API server couldn't either.
func (c *election) dial() (*clientv3.Client, error) {
	status, err := controlplane.EtcdStatuses.Get(c.store, controlplane.EtcdID)
	if err != nil {
		return nil, err
	}
	keys, err := secrets.Etcd.Get(c.store, secrets.EtcdID)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(keys.Spec.ClientCert, keys.Spec.ClientKey)
	if err != nil {
		return nil, fmt.Errorf("etcd client certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(keys.Spec.CA)
	client, err := clientv3.New(clientv3.Config{
		Endpoints:   []string{status.Spec.Endpoint},
		DialTimeout: askTimeout,
		TLS:         &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}},
		Logger:      zap.NewNop(), // errors are returned
	})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", status.Spec.Endpoint, err)
	}
	return client, nil
}

// place is the key of a candidate.
func (c *election) place(lease clientv3.LeaseID) string {
	return fmt.Sprintf("%s%s%016x", c.key, candidates, lease)
}

// enter puts this node at the end of the queue.
func (c *election) enter(ctx context.Context, client *clientv3.Client, self node) (clientv3.LeaseID, error) {
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
		clientv3.OpPut(c.key+nodes+self.Name, string(text)),
		clientv3.OpPut(c.place(lease.ID), string(text), clientv3.WithLease(lease.ID)),
	).Commit()
	if err != nil {
		c.revoke(client, lease.ID)
		return clientv3.NoLease, fmt.Errorf("be a candidate in etcd: %w", err)
	}
	return lease.ID, nil
}

// renew is one sign of life, over a stream of its own. The client's own way, one stream
// for all, is stuck for seven seconds when the leader is gone to which the member was
// about to pass one on: a lease would be lost although there is another leader.
func (c *election) renew(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	stream, err := pb.NewLeaseClient(client.ActiveConnection()).LeaseKeepAlive(ctx)
	if err == nil {
		err = stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(lease)})
	}
	if err == nil {
		_, err = stream.Recv() // whether there still is such a lease, the queue says
	}
	if err != nil {
		return fmt.Errorf("renew the lease of etcd: %w", err)
	}
	return nil
}

// leave takes this node out of the queue, and makes room for another holder at once.
func (c *election) leave(client *clientv3.Client, lease clientv3.LeaseID, as node) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	text, err := json.Marshal(as)
	if err == nil {
		holder, own := c.key+holders, clientv3.OpDelete(c.place(lease))
		_, err = client.Txn(ctx).If(
			clientv3.Compare(clientv3.Value(holder), "=", string(text)),
		).Then(clientv3.OpDelete(holder), own).Else(own).Commit()
	}
	if err != nil {
		c.trace(fmt.Errorf("leave the queue in etcd: %w", err))
	}
	c.revoke(client, lease)
}

// revoke ends a lease. Where etcd doesn't answer, time does it.
func (c *election) revoke(client *clientv3.Client, lease clientv3.LeaseID) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	if _, err := client.Revoke(ctx, lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		c.trace(fmt.Errorf("end a lease of etcd: %w", err))
	}
}

// evict puts a holder out that is gone, if it still is as etcd said: with the same place
// in the queue, and nobody named since. One that isn't gone finds out, and goes to the end
// of the queue.
func (c *election) evict(ctx context.Context, client *clientv3.Client, w view) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	holder, place := c.key+holders, c.place(w.lease)
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.ModRevision(holder), "=", w.named),
		clientv3.Compare(clientv3.CreateRevision(place), ">", 0),
	).Then(clientv3.OpDelete(holder), clientv3.OpDelete(place)).Commit()
	if err != nil {
		return fmt.Errorf("take the holder's place in the queue of etcd away: %w", err)
	}
	if done.Succeeded {
		c.revoke(client, w.lease)
	}
	return nil
}

// ask is the quorum's view: what a member that was cut off remembers doesn't count.
func (c *election) ask(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID) (view, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	asked := time.Now()
	got, err := client.Get(ctx, c.key+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		c.missing = time.Time{} // the holder may have had no answer either
		return view{}, fmt.Errorf("ask etcd who holds the address: %w", err)
	}
	w, unnamed, err := c.read(got, lease, asked)
	if err == nil && unnamed {
		err = c.take(ctx, client, &w)
	}
	return w, err
}

// read is what etcd's answer says; unnamed: this node is to be the holder, and isn't
// named yet.
func (c *election) read(got *clientv3.GetResponse, lease clientv3.LeaseID, asked time.Time) (w view, unnamed bool, err error) {
	w = view{asked: asked, revision: got.Header.Revision}
	var queue []place
	var holder node
	for _, kv := range got.Kvs {
		var n node
		if err := json.Unmarshal(kv.Value, &n); err != nil {
			return w, false, fmt.Errorf("key %s in etcd: %w", kv.Key, err)
		}
		switch key := string(kv.Key); {
		case key == c.key+holders:
			holder, w.named = n, kv.ModRevision
		case strings.HasPrefix(key, c.key+nodes):
			w.nodes = append(w.nodes, n)
		case strings.HasPrefix(key, c.key+candidates):
			queue = append(queue, place{n, clientv3.LeaseID(kv.Lease)})
		}
	}
	w.count(queue, c.first(queue, holder, lease, asked), lease)
	return w, w.mine && w.holder != holder, nil
}

// place is a candidate's, in the queue.
type place struct {
	node
	lease clientv3.LeaseID
}

// first is the place of the holder, or of the one that is to be it; -1: there is none.
func (c *election) first(queue []place, holder node, lease clientv3.LeaseID, now time.Time) int {
	at := slices.IndexFunc(queue, func(p place) bool { return p.node == holder && p.lease == lease })
	if at < 0 { // another node, which may be in the queue from before it started anew, too
		at = slices.IndexFunc(queue, func(p place) bool { return p.node == holder })
	}
	switch {
	case at >= 0 || holder == node{} || len(queue) == 0:
		c.missing = time.Time{}
	case c.missing.IsZero():
		c.missing = now
	}
	switch {
	case at >= 0:
		return at
	case len(queue) == 0 || !c.missing.IsZero() && now.Sub(c.missing) < returnWithin:
		return -1
	}
	return 0
}

// count fills in what the queue tells a node. One that has started anew may be in it
// twice, until its old lease ends.
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

// take names this node the holder, if nobody else was meanwhile, and nobody has come
// into the queue who may be the one that was missing.
func (c *election) take(ctx context.Context, client *clientv3.Client, w *view) error {
	text, err := json.Marshal(w.holder)
	if err != nil {
		return err
	}
	key := c.key + holders
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.ModRevision(key), "=", w.named),
		clientv3.Compare(clientv3.CreateRevision(c.place(w.lease)), ">", 0),
		clientv3.Compare(clientv3.CreateRevision(c.key+candidates), "<", w.revision+1).WithPrefix(),
	).Then(clientv3.OpPut(key, string(text))).Commit()
	if err != nil {
		return fmt.Errorf("be the holder in etcd: %w", err)
	}
	if !done.Succeeded { // and etcd tells of what has changed
		w.held, w.mine = false, false
	}
	return nil
}

// knows is the name of the control plane with this MAC address.
func (w view) knows(mac net.HardwareAddr) (name string, ok bool) {
	for _, n := range w.nodes {
		if n.MAC == mac.String() {
			return n.Name, true
		}
	}
	return "", false
}

//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// queueBudget is for etcd to queue a client, or to pass the mutex on.
const queueBudget = 20 * time.Second

// S-217: of several control planes one at a time makes what is missing. The
// next in the queue continues when the one before is done, or has lost its
// session; one that gives up doesn't block the others.
func TestRealMutex(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.prepare()
	n.runControllers()
	n.startEtcd()
	client, err := etcd.Dial(t.Context(), n.store, n.etcdURL)
	put(t, err)
	t.Cleanup(func() { client.Close() })
	q := &queue{n: n, etcd: client, inside: make(chan turn)}

	first := q.join(t.Context())
	one := q.entered()
	second := q.join(t.Context())
	q.has(2)
	hurried, cancel := context.WithCancel(t.Context())
	third := q.join(hurried)
	q.has(3)
	// Those that wait don't have the mutex.
	select {
	case <-q.inside:
		t.Fatal("two hold the mutex")
	default:
	}
	gaveUp := time.Now()
	cancel()
	if err := <-third; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), applyMutex) {
		t.Errorf("who gave up waiting: %v", err)
	}
	q.has(2)
	if took := time.Since(gaveUp); took > applyTTL*time.Second/2 {
		t.Errorf("who gave up waiting was in the way for %s more", took)
	}
	one.end <- nil
	put(t, <-first)

	two := q.entered()
	fourth := q.join(t.Context())
	q.has(2)
	// etcd ends the session of the holder, as of one that was away too long.
	_, err = client.Revoke(t.Context(), q.places()[0])
	put(t, err)
	four := q.entered()
	select {
	case <-two.ctx.Done():
	case <-time.After(eventually.Scale(queueBudget)):
		t.Error("who lost the mutex goes on")
	}
	two.end <- two.ctx.Err()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Errorf("who lost the mutex: %v", err)
	}
	mine := errors.New("it can't be made")
	four.end <- mine
	if err := <-fourth; !errors.Is(err, mine) {
		t.Errorf("who was inside last: %v, want %v", err, mine)
	}
	q.has(0)
}

// queue is the mutex in etcd: a key for each client that wants it.
type queue struct {
	n      *realNode
	etcd   *clientv3.Client
	inside chan turn // who has the mutex now
}

// turn is a client with the mutex, until the test sends the result with which it ends.
type turn struct {
	ctx context.Context
	end chan error
}

// join adds a control plane that wants the mutex.
func (q *queue) join(ctx context.Context) (ended chan error) {
	ended = make(chan error, 1)
	go func() {
		ended <- withMutex(ctx, q.n.store, q.n.etcdURL, func(ctx context.Context, _ clientv3.KV) error {
			mine := turn{ctx, make(chan error)}
			q.inside <- mine
			return <-mine.end
		})
	}()
	return ended
}

func (q *queue) entered() turn {
	q.n.t.Helper()
	select {
	case in := <-q.inside:
		return in
	case <-time.After(eventually.Scale(queueBudget)):
		q.n.t.Fatal("nobody has the mutex")
		return turn{}
	}
}

// places are the sessions in the queue, in the order of their requests.
func (q *queue) places() (all []clientv3.LeaseID) {
	q.n.t.Helper()
	found, err := q.etcd.Get(q.n.t.Context(), applyMutex+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	put(q.n.t, err)
	for _, kv := range found.Kvs {
		all = append(all, clientv3.LeaseID(kv.Lease))
	}
	return all
}

func (q *queue) has(want int) {
	q.n.t.Helper()
	eventually.That(q.n.t, queueBudget, fmt.Sprintf("%d to want the mutex", want), func() error {
		if all := q.places(); len(all) != want {
			return fmt.Errorf("there are %d", len(all))
		}
		return nil
	})
}

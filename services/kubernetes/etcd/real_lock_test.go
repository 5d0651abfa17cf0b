//go:build e2e

package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// lockStays is longer than these tests: a lock that is gone earlier was given back, or lost.
const lockStays = 10 * time.Minute

// takeLock takes the lock for an operation of this node.
func (n *realNode) takeLock(id string) (operation.Taken, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // like a node
	defer cancel()
	return n.Lock().Take(ctx, operation.Holder{Name: "reset", ID: id, Since: time.Now(), Stays: lockStays})
}

// refusesLock checks that the lock is refused, and that the error names the holder.
func (n *realNode) refusesLock(holder *realNode, id string) {
	t := n.rig.t
	t.Helper()
	_, err := n.takeLock("other")
	var held *operation.HeldError
	if !errors.As(err, &held) || held.Holder.Node != holder.name || held.Holder.ID != id {
		t.Fatalf("%s can take the lock of %s: %v", n.name, holder.name, err)
	}
	seen, err := n.Lock().Look(t.Context())
	if err != nil || seen == nil || seen.Node != holder.name {
		t.Fatalf("%s sees %+v, %v", n.name, seen, err)
	}
}

// One control plane at a time: the lock is one key for all of them, whichever
// members answer.
func TestRealLock(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	for _, n := range []*realNode{b, c} {
		n.start()
		n.serves()
	}
	if h, err := b.Lock().Look(t.Context()); h != nil || err != nil {
		t.Fatalf("nobody has taken it: %+v, %v", h, err)
	}
	first, err := a.takeLock("reset-a")
	must(t, err)
	b.refusesLock(a, "reset-a")
	if h, err := a.Lock().Look(t.Context()); h != nil || err != nil {
		t.Errorf("its own is in its way: %+v, %v", h, err)
	}

	// It stays as long as its operation says, should the node be lost.
	if lease, err := first.(*held).client.TimeToLive(t.Context(), first.(*held).lease); err != nil || lease.GrantedTTL != int64(lockStays/time.Second) {
		t.Errorf("the lock stays for %+v: %v", lease, err)
	}

	// A restarted node takes its own lock again, and its old hold has ended.
	again, err := a.takeLock("reset-a")
	must(t, err)
	must(t, first.Release(t.Context(), 0))
	b.refusesLock(a, "reset-a")

	// A node whose own etcd has ended, as in a reset, releases the lock through other members.
	must(t, a.notePeers(t.Context()))
	a.kill()
	b.refusesLock(a, "reset-a")
	must(t, again.Release(t.Context(), 0))
	// It also takes it through them.
	without, err := a.takeLock("reset-a")
	must(t, err)
	b.refusesLock(a, "reset-a")
	must(t, without.Release(t.Context(), 0))

	// The lock stays for a while: until then others wait.
	second, err := b.takeLock("reboot-b")
	must(t, err)
	must(t, second.Release(t.Context(), 15*time.Second))
	c.refusesLock(b, "reboot-b")
	var third operation.Taken
	eventually.That(t, time.Minute, "the lock of a node that doesn't come back to end", func() error {
		third, err = c.takeLock("reset-c")
		return err
	})
	must(t, third.Release(t.Context(), 0))

	// Without a quorum the holder is unknown.
	b.kill()
	_, err = c.takeLock("reset-c")
	if held := new(operation.HeldError); err == nil || errors.As(err, &held) || !strings.Contains(fmt.Sprint(err), "quorum") {
		t.Errorf("without a quorum: %v", err)
	}
	look, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	if _, err := c.Lock().Look(look); err == nil {
		t.Error("without a quorum somebody can tell who has it")
	}
}

// A lock that can't be given back while no member runs is given back afterwards.
func TestRealLockIsReleasedLater(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	b.start()
	b.serves()
	taken, err := a.takeLock("reset-a")
	must(t, err)
	a.kill()
	b.kill()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := taken.Release(ctx, 0); err == nil {
		t.Error("it is given back to nobody")
	}
	a.start()
	b.start()
	a.serves()
	b.serves()
	eventually.That(t, time.Minute, "the lock to be given back", func() error {
		h, err := b.Lock().Look(t.Context())
		if err == nil && h != nil {
			err = fmt.Errorf("%s", h)
		}
		return err
	})
}

// A node that loses the lock to another one while the cluster has no quorum reports that.
func TestRealLockIsLost(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	var said strings.Builder
	a.o.Log = slog.New(slog.NewTextHandler(&said, nil))
	a.start()
	a.serves()
	r.knows(0, a.addr)
	b.start()
	b.serves()
	taken, err := a.takeLock("reset-a")
	must(t, err)
	ours := taken.(*held)
	_, err = ours.client.Revoke(t.Context(), ours.lease)
	must(t, err)
	theirs, err := b.takeLock("reset-b")
	must(t, err)
	ours.keeping.Wait()
	if !strings.Contains(said.String(), "node b is running reset (reset-b)") {
		t.Errorf("said %q", said.String())
	}
	// Its release doesn't affect the other node's lock.
	must(t, taken.Release(t.Context(), 0))
	a.refusesLock(b, "reset-b")
	must(t, theirs.Release(t.Context(), 0))
}

// The lock of a holder that is gone ends; that of a running holder doesn't.
func TestRealLockOutlivesItsLease(t *testing.T) {
	t.Parallel()
	_, node := realRig(t)
	a := node("a", config.Init)
	a.start()
	a.serves()
	taken, err := a.takeLock("reset-a")
	must(t, err)
	ours := taken.(*held)
	// The cluster had no quorum for longer than the lease: it is lost, and taken again.
	_, err = ours.client.Revoke(t.Context(), ours.lease)
	must(t, err)
	eventually.That(t, 2*lockRenewal+10*time.Second, "the lock to be taken again", func() error {
		found, err := ours.client.Get(t.Context(), lockKey)
		if err == nil && len(found.Kvs) == 0 {
			err = errors.New("nobody has it")
		}
		return err
	})
	must(t, taken.Release(t.Context(), 0))
	found, err := ours.client.Get(t.Context(), lockKey)
	if err == nil && len(found.Kvs) > 0 {
		t.Errorf("given back, it is still there: %s", found.Kvs[0].Value)
	}
}

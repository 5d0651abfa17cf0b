//go:build e2e && long

package vip

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// freezes is enough for a failure that happened once in seven times.
	freezes = 12
	// frozenFor is longer than a lease, so that all have expired for the frozen member.
	frozenFor = (candidateTTL + 2) * time.Second
	// heldFor is longer than the time after which a missing holder is given up.
	heldFor = returnWithin + 2*askEvery
)

// S-116: the member of the holder leads etcd, and is frozen. Another node gets the address,
// and keeps it when the former leader is back and ends the leases of all.
func TestTheLeaderIsFrozen(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	stores, members := realEtcds(t, 3)
	var all []*candidate
	for i, n := range []node{nodeA, nodeB, nodeC} {
		c := newCandidate(t, stores[i], n)
		c.setCandidate(&c.self)
		all = append(all, c)
	}
	client, err := all[0].dial()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var urls []string
	for _, m := range members {
		urls = append(urls, m.endpoint)
	}
	client.SetEndpoints(urls...)
	ended := 0
	for range freezes {
		was := slices.IndexFunc(all, func(c *candidate) bool {
			return c.waitFor("one is the holder", func(w view) bool { return w.held && w.own && w.others == 2 }).mine
		})
		lead(t, client, members[was].endpoint)
		for _, c := range all {
			c.mu.Lock()
			c.holders = nil
			c.mu.Unlock()
		}
		began := time.Now()
		signal(t, members[was], syscall.SIGSTOP)
		is := -1
		eventually.That(t, 20*time.Second, "another one is the holder", func() error {
			for i, c := range all {
				c.mu.Lock()
				w := c.last
				c.mu.Unlock()
				switch {
				case i == was || time.Since(w.askedAt) > askEvery:
				case w.mine:
					is = i
					return nil
				case w.next && w.holder == all[was].self:
					offer(c.evictions, w)
				}
			}
			return errors.New("nobody else")
		})
		before := all[is].waitFor("it is", func(w view) bool { return w.mine })
		eventually.That(t, 2*frozenFor, "all leases are expired for who is frozen", func() error {
			if time.Since(began) < frozenFor {
				return errors.New("not yet")
			}
			return nil
		})
		signal(t, members[was], syscall.SIGCONT)
		thawed := time.Now()
		eventually.That(t, 2*heldFor, "the address stays", func() error {
			if time.Since(thawed) < heldFor {
				return errors.New("so far")
			}
			return nil
		})
		for _, c := range all {
			c.waitFor("all are back", func(w view) bool { return w.own && w.others == 2 && w.holder == all[is].self })
		}
		if after := all[is].waitFor("it is", func(w view) bool { return w.mine }); after.lease != before.lease {
			ended++
		}
		want := fmt.Sprint([]string{all[was].self.Name, all[is].self.Name})
		for _, c := range all {
			c.mu.Lock()
			got := fmt.Sprint(c.holders)
			c.mu.Unlock()
			if got != want && !strings.HasSuffix(want, got[1:]) {
				t.Errorf("%s heard of the holders %s, not %s", c.self.Name, got, want)
			}
		}
	}
	t.Logf("frozen %d times; after %d of them etcd ended the holder's lease", freezes, ended)
}

func signal(t *testing.T, m *member, s syscall.Signal) {
	t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// lead makes a member the leader.
func lead(t *testing.T, client *clientv3.Client, endpoint string) {
	t.Helper()
	eventually.That(t, 20*time.Second, endpoint+" leads", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*askTimeout)
		defer cancel()
		s, err := client.Status(ctx, endpoint)
		if err != nil || s.Leader == s.Header.MemberId {
			return err
		}
		_, err = client.MoveLeader(ctx, s.Header.MemberId) // it must be sent to the leader
		return errors.Join(errors.New("another one leads"), err)
	})
}

package vip

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	nodeA = node{Name: "a", Address: netip.MustParseAddr("10.5.0.2"), MAC: ownMAC.String()}
	nodeB = node{Name: "b", Address: netip.MustParseAddr("10.5.0.3"), MAC: peerMAC.String()}
	nodeC = node{Name: "c", Address: netip.MustParseAddr("10.5.0.4"), MAC: "02:00:00:00:00:0c"}
)

// TestReadQueue tests how a node with a lease reads one answer of etcd. Leases
// count from 1 on, in the order of the queue.
func TestReadQueue(t *testing.T) {
	namesake := nodeB
	namesake.Name = "a"
	for _, c := range []struct {
		name    string
		holder  node
		queue   []node
		lease   clientv3.LeaseID
		missing time.Duration // how long the holder has been missing
		want    string
	}{
		{"nobody", node{}, nil, 0, 0, "nobody, beside 0"},
		{"the first without a holder", node{}, []node{nodeA, nodeB}, 1, 0, "a 1 mine unnamed, beside 1"},
		{"the second without a holder", node{}, []node{nodeA, nodeB}, 2, 0, "a 1 next, beside 1"},
		{"a holder that isn't first", nodeB, []node{nodeA, nodeB, nodeC}, 2, 0, "b 2 mine, beside 2"},
		{"the first isn't the holder", nodeB, []node{nodeA, nodeB, nodeC}, 1, 0, "b 2 next, beside 2"},
		{"the last one isn't next", nodeB, []node{nodeA, nodeB, nodeC}, 3, 0, "b 2, beside 2"},
		{"who is no candidate", nodeB, []node{nodeA, nodeB}, 9, 0, "b 2, beside 2"},
		{"a holder that is missing", nodeC, []node{nodeA, nodeB}, 1, returnWithin / 2, "nobody, beside 1"},
		{"a holder that stays away", nodeC, []node{nodeA, nodeB}, 1, returnWithin, "a 1 mine unnamed, beside 1"},
		{"which another one takes the place of", nodeC, []node{nodeA, nodeB}, 2, returnWithin, "a 1 next, beside 1"},
		{"a holder that started anew", nodeA, []node{nodeA, nodeB, nodeA}, 3, 0, "a 3 mine, beside 1"},
		{"for the next", nodeA, []node{nodeA, nodeB, nodeA}, 2, 0, "a 1 next, beside 1"},
		{"and where it comes before that", nodeA, []node{nodeA, nodeA, nodeB}, 3, 0, "a 1 next, beside 1"},
		{"the next started anew", nodeA, []node{nodeB, nodeC, nodeA, nodeB}, 4, 0, "a 3 next, beside 2"},
		{"two nodes of one name: the holder", nodeA, []node{namesake, nodeA}, 2, 0, "a 2 mine, beside 1"},
		{"two nodes of one name: the other", nodeA, []node{namesake, nodeA}, 1, 0, "a 2 next, beside 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			now := time.Now()
			election := newElection(nil, shared4, nil, nil)
			if c.missing > 0 {
				election.missing = now.Add(-c.missing)
			}
			got := &clientv3.GetResponse{Header: &etcdserverpb.ResponseHeader{Revision: 100}}
			put := func(key string, n node, lease int64) {
				text, err := json.Marshal(n)
				if err != nil {
					t.Fatal(err)
				}
				got.Kvs = append(got.Kvs, &mvccpb.KeyValue{Key: []byte(election.key + key), Value: text, Lease: lease, ModRevision: int64(len(got.Kvs) + 1)})
			}
			put("/of-a-later-release", nodeC, 0)
			if c.holder != (node{}) {
				put(holders, c.holder, 0)
			}
			for i, n := range c.queue {
				put(fmt.Sprintf("%s%016x", candidates, i+1), n, int64(i+1))
			}
			w, unnamed, err := election.read(got, c.lease, now)
			if err != nil {
				t.Fatal(err)
			}
			text := "nobody"
			if w.held {
				text = fmt.Sprintf("%s %d", w.holder.Name, w.lease)
			}
			for _, is := range []struct {
				so   bool
				what string
			}{{w.mine, " mine"}, {w.next, " next"}, {unnamed, " unnamed"}} {
				if is.so {
					text += is.what
				}
			}
			if text += fmt.Sprintf(", beside %d", w.others); text != c.want {
				t.Errorf("read %q, not %q", text, c.want)
			}
			if (w.named == 0) != (c.holder == node{}) || w.own != (int(c.lease) <= len(c.queue) && c.lease > 0) {
				t.Errorf("named at %d, own %t", w.named, w.own)
			}
		})
	}
}

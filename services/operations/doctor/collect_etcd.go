package doctor

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
)

// etcdHealth is where etcd serves its health, in plain HTTP on loopback.
const etcdHealth = "http://127.0.0.1:2381"

// member is what this node's etcd returns about itself and its cluster. What it doesn't
// answer is empty: ready says why.
type member struct {
	ready   answer
	members []*pb.Member
	alarms  []string // NOSPACE, CORRUPT
}

func (m *member) voters() int {
	return len(slices.DeleteFunc(slices.Clone(m.members), func(one *pb.Member) bool { return one.IsLearner }))
}

func describeMember(m *pb.Member) string {
	learner := ""
	if m.IsLearner {
		learner = " (learner)"
	}
	return fmt.Sprintf("etcd member %s %s%s", m.Name, m.PeerURLs, learner)
}

func (d *Doctor) collectEtcd(ctx context.Context, _ *snapshot) func(*snapshot) {
	m := &member{}
	var wg sync.WaitGroup
	wg.Go(func() { m.ready = ask(ctx, d.o.health+readyPath, netip.Addr{}, &tls.Config{}) })
	wg.Go(func() { d.listEtcd(ctx, m) }) // without a leader the first one hangs, and this doesn't
	wg.Wait()
	return func(s *snapshot) { s.etcd = m }
}

// listEtcd asks this node's member for all members and alarms. The first answer needs no
// leader.
func (d *Doctor) listEtcd(ctx context.Context, m *member) {
	status, err := etcd.Statuses.Get(d.o.Store, etcd.StatusID)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := etcd.Dial(ctx, d.o.Store, status.Spec.Endpoint)
	if err != nil {
		return
	}
	defer c.Close()
	found, err := c.MemberList(ctx, clientv3.WithSerializable())
	if err != nil {
		return
	}
	m.members = found.Members
	if alarms, err := c.AlarmList(ctx); err == nil {
		m.alarms = lists.Of(alarms.Alarms, func(a *pb.AlarmMember) string { return a.Alarm.String() })
	}
}

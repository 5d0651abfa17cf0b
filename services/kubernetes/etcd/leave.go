package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// leaveTimeout limits what follows the removal: the service stops within its
// own budget, and its data is removed.
const leaveTimeout = time.Minute

// SettleTimeout is how long other members may know no leader, or not answer, before
// a running operation gives up. A leader may have just gone, and members that don't
// know the next one yet don't count: on busy machines that takes seconds.
const SettleTimeout = 15 * time.Second

// removal is the cluster's view of a member that will leave it, or be down.
type removal struct {
	client *clientv3.Client // nil: there is nothing to leave
	found  *clientv3.MemberListResponse
	own    *pb.Member // nil: the cluster has no member of this node
	local  bool       // the answer is from this node's own member
}

func (p *removal) close() {
	if p.client != nil {
		p.client.Close()
	}
}

// may counts the members by a rule: mayRemove or mayStop.
func (p *removal) may(rule func([]*pb.Member, *pb.Member, map[uint64]bool) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if p.own == nil {
			return nil
		}
		return rule(p.found.Members, p.own, answering(ctx, p.client, p.found.Members))
	}
}

// settle counts again until the others have settled, or patience is over.
func settle(ctx context.Context, patience time.Duration, count func(context.Context) error) error {
	end := time.Now().Add(patience)
	for {
		err := count(ctx)
		if !errors.Is(err, ErrQuorum) || !time.Now().Before(end) || !sleep.For(ctx, promoteRetry) {
			return err
		}
	}
}

// MayLeave reports whether this node's member could leave now. It returns nil
// if it could, or if there is no member that the cluster would miss: nothing
// was begun, or it has left. A Refusal (with ErrQuorum or ErrLast) lists the
// members that were counted; any other error is the reason why they can't be.
// Before it refuses because of the quorum it counts again until patience is
// over: 0 for a plan, SettleTimeout for a running operation. It changes
// nothing, and takes at most half a minute in addition. On a worker it refuses.
func (e *Etcd) MayLeave(ctx context.Context, patience time.Duration) error {
	return e.may(ctx, patience, mayRemove)
}

// MayStop reports whether this node could go down and come back, as a member all the
// time. A Refusal with ErrQuorum lists the members that were counted, also if the
// quorum is lost already; any other error is the reason why they can't be. It returns
// nil if the cluster would miss nothing. It changes nothing, and takes at most half a
// minute, in addition to patience as in MayLeave. On a worker it refuses.
func (e *Etcd) MayStop(ctx context.Context, patience time.Duration) error {
	return e.may(ctx, patience, mayStop, clientv3.WithSerializable())
}

// may is whether a rule lets this node's member go.
func (e *Etcd) may(ctx context.Context, patience time.Duration, rule func([]*pb.Member, *pb.Member, map[uint64]bool) error, options ...clientv3.OpOption) error {
	p, err := e.ownMember(ctx, options...)
	if err != nil {
		return err
	}
	defer p.close()
	return settle(ctx, patience, p.may(rule))
}

// Leave removes this node's member from the cluster, stops the service and
// removes its data; name is "" if there was nothing to leave. It refuses what
// MayLeave refuses. It may be called again, after an error or a power cut, and
// continues. The service joins again when it is started again.
func (e *Etcd) Leave(ctx context.Context) (name string, err error) {
	name, was, err := e.remove(ctx)
	if err != nil || !was {
		return "", err
	}
	return name, e.discard(ctx)
}

// remove removes this node's member from the cluster. was is false if the node
// has no member and no data of one; name is "" if the member was removed before.
func (e *Etcd) remove(ctx context.Context) (name string, was bool, err error) {
	p, err := e.ownMember(ctx)
	if err != nil {
		return "", false, fmt.Errorf("leave etcd: %w", err)
	}
	defer p.close()
	if p.own == nil {
		return "", p.client != nil, nil
	}
	if err := settle(ctx, SettleTimeout, p.may(mayRemove)); err != nil {
		return "", false, err
	}
	if p.local && !p.own.IsLearner {
		if _, _, err := forfeit(ctx, p.client, p.found); err != nil {
			return "", false, fmt.Errorf("leave etcd: %w", err)
		}
	}
	err = e.inTurn(ctx, func() error {
		// The member itself, once removed, may have ended before it could answer. Then
		// there is an error although the removal has succeeded.
		err := settle(ctx, SettleTimeout, p.may(mayRemove))
		if err == nil {
			err = takeOut(ctx, p.client, p.own)
		}
		if err != nil && !e.removed(ctx, p) {
			return fmt.Errorf("leave etcd: %w", err)
		}
		return nil
	})
	return called(p.own), err == nil, err
}

// discard stops the service and removes the data of a member that was removed.
// It can't be undone or interrupted, whether the caller waits or not.
func (e *Etcd) discard(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	return e.inTurn(ctx, func() error {
		before, err := e.read()
		if err != nil {
			return err
		}
		if err := e.o.Stop(ctx); err != nil {
			return fmt.Errorf("leave etcd: its member is removed; stop the service: %w", err)
		}
		if err := e.clean(); err != nil {
			return fmt.Errorf("leave etcd: its member is removed; remove its data: %w", err)
		}
		return e.write(record{Phase: waiting, Peers: before.Peers})
	})
}

// Settled returns when nothing is in progress that a start of the service would
// disturb: a member that leaves, joins or is recovered.
func (e *Etcd) Settled(ctx context.Context) error {
	if err := e.inTurn(ctx, func() error { return nil }); err != nil {
		return fmt.Errorf("wait until etcd has left: %w", err)
	}
	return nil
}

// removed reports whether the other members say that it isn't a member any more.
func (e *Etcd) removed(ctx context.Context, p *removal) bool {
	var urls []string
	for _, m := range p.found.Members {
		if m.ID != p.own.ID && !m.IsLearner {
			urls = append(urls, m.ClientURLs...)
		}
	}
	if len(urls) == 0 {
		return false
	}
	c, err := Dial(ctx, e.o.Store, urls...)
	if err != nil {
		return false
	}
	defer c.Close()
	now, err := list(ctx, c)
	return err == nil && now.Header.ClusterId == p.found.Header.ClusterId &&
		!slices.ContainsFunc(now.Members, func(m *pb.Member) bool { return m.ID == p.own.ID })
}

// ownMember asks this node's own member, or else the others, for the member of this node.
func (e *Etcd) ownMember(ctx context.Context, how ...clientv3.OpOption) (*removal, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("%s", why)
	}
	r, data, err := e.begun()
	if err != nil {
		return nil, err
	}
	if !data && (r.Phase == none || r.Phase == fresh || r.Phase == waiting) {
		return &removal{}, nil
	}
	silent := errors.New("it has no data")
	if data {
		p, err := e.ownMemberLocal(ctx, how...)
		if err == nil {
			return p, nil
		}
		silent = err
	}
	found, c, err := e.cluster(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("this node's own etcd can't be asked (%w), nor can the others: %w", silent, err)
	}
	p := &removal{client: c, found: found}
	if id, ok, err := e.identity(); err == nil && ok {
		r.Member, r.Cluster = HexID(id.member), HexID(id.cluster)
	}
	if r.Cluster != "" && HexID(found.Header.ClusterId) != r.Cluster {
		c.Close() // this cluster never had it, and its data isn't removed by leaving
		return &removal{}, nil
	}
	me, err := e.o.self()
	if err != nil {
		c.Close()
		return nil, err
	}
	at := slices.IndexFunc(found.Members, func(m *pb.Member) bool {
		return HexID(m.ID) == r.Member || r.Member == "" && slices.Contains(m.PeerURLs, me.peerURL())
	})
	if at >= 0 {
		p.own = found.Members[at]
	}
	return p, nil
}

// ownMemberLocal asks this node's own member.
func (e *Etcd) ownMemberLocal(ctx context.Context, how ...clientv3.OpOption) (*removal, error) {
	c, found, err := e.askLocal(ctx, how...)
	if err != nil {
		return nil, err
	}
	p := &removal{client: c, found: found, local: true}
	at := slices.IndexFunc(found.Members, func(m *pb.Member) bool { return m.ID == found.Header.MemberId })
	if at < 0 {
		c.Close()
		return nil, fmt.Errorf("member %s: %w", HexID(found.Header.MemberId), ErrNoMember)
	}
	p.own = found.Members[at]
	return p, nil
}

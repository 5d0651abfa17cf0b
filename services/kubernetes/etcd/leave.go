package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// leaveTimeout bounds what follows the removal: the service stops within its own
// budget, and its data is removed.
const leaveTimeout = time.Minute

// SettleTimeout is how long others may know no leader, or be silent, before a node that is
// on its way gives up. A leader may just have gone, and those that haven't heard of the next
// one don't count: on busy machines that takes seconds.
const SettleTimeout = 15 * time.Second

// parting is what the cluster says of the member that is to leave it, or to be away.
type parting struct {
	client *clientv3.Client // nil: there is nothing to leave
	found  *clientv3.MemberListResponse
	own    *pb.Member // nil: the cluster has no member of this node
	local  bool       // this node's own member was asked
}

func (p *parting) close() {
	if p.client != nil {
		p.client.Close()
	}
}

// mayLeave counts the voting members that are left.
func (p *parting) mayLeave(ctx context.Context) error {
	if p.own == nil {
		return nil
	}
	return mayRemove(p.found.Members, p.own, answering(ctx, p.client, p.found.Members))
}

// mayStop counts the members that answer while this one doesn't.
func (p *parting) mayStop(ctx context.Context) error {
	if p.own == nil {
		return nil
	}
	return mayStop(p.found.Members, p.own, answering(ctx, p.client, p.found.Members))
}

// settle counts again until the others have settled, or patience is over.
func settle(ctx context.Context, patience time.Duration, count func(context.Context) error) error {
	end := time.Now().Add(patience)
	for {
		err := count(ctx)
		if !errors.Is(err, ErrQuorum) || !time.Now().Before(end) {
			return err
		}
		if !sleep.For(ctx, promoteRetry) {
			return err
		}
	}
}

// remove takes the member out of the cluster.
func (p *parting) remove(ctx context.Context) error {
	if err := settle(ctx, SettleTimeout, p.mayLeave); err != nil {
		return err
	}
	return takeOut(ctx, p.client, p.own)
}

// MayLeave says whether this node's member could leave now. It is nil where it
// could, and where there is none that the cluster would miss: nothing was begun, or
// it has left. A Refusal (with ErrQuorum or ErrLast) names the members that were
// counted; any other error says why they can't be. Before it refuses for the quorum it
// counts again until patience is over: 0 for who plans, SettleTimeout for who is on its
// way. It changes nothing, and takes half a minute at most besides. On a worker it
// refuses.
func (e *Etcd) MayLeave(ctx context.Context, patience time.Duration) error {
	p, err := e.part(ctx, list)
	if err != nil {
		return err
	}
	defer p.close()
	return settle(ctx, patience, p.mayLeave)
}

// MayStop says whether this node could go and come back, as a member all the while. A
// Refusal with ErrQuorum names the members that were counted, also where the quorum is
// lost already; any other error says why they can't be. It is nil where the cluster
// would miss nothing. It changes nothing, and takes half a minute at most, besides the
// patience that it has as MayLeave. On a worker it refuses.
func (e *Etcd) MayStop(ctx context.Context, patience time.Duration) error {
	p, err := e.part(ctx, known)
	if err != nil {
		return err
	}
	defer p.close()
	return settle(ctx, patience, p.mayStop)
}

// Leave takes this node's member out of the cluster, stops the service and removes
// its data; name is "" where there was nothing to leave. It refuses what MayLeave
// refuses. It may be asked for again, after an error or a power cut, and goes on. The
// service, when it is started again, joins anew.
func (e *Etcd) Leave(ctx context.Context) (name string, err error) {
	name, was, err := e.remove(ctx)
	if err != nil || !was {
		return "", err
	}
	return name, e.discard(ctx)
}

// remove takes this node's member out of the cluster. was is false where the node has
// none, nor data of one; name is "" where the member was removed before.
func (e *Etcd) remove(ctx context.Context) (name string, was bool, err error) {
	p, err := e.part(ctx, list)
	if err != nil {
		return "", false, fmt.Errorf("leave etcd: %w", err)
	}
	defer p.close()
	if p.own == nil {
		return "", p.client != nil, nil
	}
	if err := settle(ctx, SettleTimeout, p.mayLeave); err != nil {
		return "", false, err
	}
	if p.local && !p.own.IsLearner {
		if _, _, err := forfeit(ctx, p.client, p.found); err != nil {
			return "", false, fmt.Errorf("leave etcd: %w", err)
		}
	}
	done, err := e.take(ctx)
	if err != nil {
		return "", false, err
	}
	defer done()
	// An error may be the answer that the member itself, once removed, didn't live to give.
	if err := p.remove(ctx); err != nil && !e.removed(ctx, p) {
		return "", false, fmt.Errorf("leave etcd: %w", err)
	}
	return called(p.own), true, nil
}

// discard stops the service and removes the data of a member that is removed. There is no
// way back from here, whether the caller waits or not.
func (e *Etcd) discard(ctx context.Context) error {
	done, err := e.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	before, err := e.read()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := e.o.Stop(ctx); err != nil {
		return fmt.Errorf("leave etcd: its member is removed; stop the service: %w", err)
	}
	if err := e.clean(); err != nil {
		return fmt.Errorf("leave etcd: its member is removed; remove its data: %w", err)
	}
	return e.write(record{Phase: waiting, Peers: before.Peers})
}

// Settled returns when nothing is under way that a start of the service must not meet: a
// member that leaves, joins or is recovered.
func (e *Etcd) Settled(ctx context.Context) error {
	done, err := e.take(ctx)
	if err != nil {
		return fmt.Errorf("wait until etcd has left: %w", err)
	}
	done()
	return nil
}

// removed is whether the others say that the member isn't one any more.
func (e *Etcd) removed(ctx context.Context, p *parting) bool {
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

// asking is how this node's own member is asked for the others: through the quorum, as
// list does, or for what it knows itself.
type asking func(context.Context, *clientv3.Client) (*clientv3.MemberListResponse, error)

// part asks this node's own member, or else the others, for the member that is to go.
func (e *Etcd) part(ctx context.Context, ask asking) (*parting, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("%s", why)
	}
	r, err := e.read()
	if err != nil {
		return nil, err
	}
	data, err := e.hasData()
	if err != nil {
		return nil, err
	}
	if !data && (r.Phase == none || r.Phase == fresh || r.Phase == waiting) {
		return &parting{}, nil
	}
	silent := errors.New("it has no data")
	if data {
		p, err := e.partHere(ctx, ask)
		if err == nil {
			return p, nil
		}
		silent = err
	}
	found, c, err := e.cluster(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("this node's own etcd can't be asked (%w), nor can the others: %w", silent, err)
	}
	p := &parting{client: c, found: found}
	if id, ok, err := e.identity(); err == nil && ok {
		r.Member, r.Cluster = HexID(id.member), HexID(id.cluster)
	}
	if r.Cluster != "" && HexID(found.Header.ClusterId) != r.Cluster {
		c.Close() // this cluster never had it, and its data is nothing that leaving removes
		return &parting{}, nil
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

// partHere asks this node's own member.
func (e *Etcd) partHere(ctx context.Context, ask asking) (*parting, error) {
	c, err := e.local(ctx)
	if err != nil {
		return nil, err
	}
	found, err := ask(ctx, c)
	if err != nil {
		c.Close()
		return nil, err
	}
	p := &parting{client: c, found: found, local: true}
	at := slices.IndexFunc(found.Members, func(m *pb.Member) bool { return m.ID == found.Header.MemberId })
	if at < 0 {
		c.Close()
		return nil, fmt.Errorf("member %s: %w", HexID(found.Header.MemberId), ErrNoMember)
	}
	p.own = found.Members[at]
	return p, nil
}

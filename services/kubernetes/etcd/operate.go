package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// defragmentTimeout: a database of the largest size that etcd recommends, 8 GB, is
// copied in a minute on a slow disk.
const defragmentTimeout = 3 * time.Minute

// ErrNoMember is the error for a member that doesn't exist.
var ErrNoMember = errors.New("the cluster has no such etcd member")

// local is a client of this node's own member.
func (e *Etcd) local(ctx context.Context) (*clientv3.Client, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("%s", why)
	}
	me, err := e.o.self()
	if err != nil {
		return nil, err
	}
	return Dial(ctx, e.o.Store, clientURL(me.addr))
}

// askLocal asks this node's own member for the members: through the quorum, or
// with clientv3.WithSerializable for those that it knows. The caller closes the client.
func (e *Etcd) askLocal(ctx context.Context, how ...clientv3.OpOption) (*clientv3.Client, *clientv3.MemberListResponse, error) {
	c, err := e.local(ctx)
	if err != nil {
		return nil, nil, err
	}
	found, err := list(ctx, c, how...)
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	return c, found, nil
}

// Members are those that this node's member knows: it needs no quorum for that.
func (e *Etcd) Members(ctx context.Context) (clusterID string, members []*pb.Member, err error) {
	c, found, err := e.askLocal(ctx, clientv3.WithSerializable())
	if err != nil {
		return "", nil, err
	}
	defer c.Close()
	return HexID(found.Header.ClusterId), found.Members, nil
}

// Status asks each member for its status.
func (e *Etcd) Status(ctx context.Context) ([]MemberStatus, error) {
	c, found, err := e.askLocal(ctx, clientv3.WithSerializable())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return statuses(ctx, c, found.Members), nil
}

// Snapshot writes the database of this node's member, and after it its SHA-256.
func (e *Etcd) Snapshot(ctx context.Context, to io.Writer) error {
	c, err := e.local(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	from, err := c.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("snapshot of etcd: %w", err)
	}
	defer from.Close()
	if _, err := io.Copy(to, from); err != nil {
		return fmt.Errorf("snapshot of etcd: %w", err)
	}
	return nil
}

// Defragment returns unused space to the disk, and returns the size of the
// database before and after.
func (e *Etcd) Defragment(ctx context.Context) (before, after int64, err error) {
	c, err := e.local(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, defragmentTimeout)
	defer cancel()
	url := c.Endpoints()[0]
	was, err := c.Status(ctx, url)
	if err == nil {
		_, err = c.Defragment(ctx, url)
	}
	is, unknown := c.Status(ctx, url)
	if err = cmp.Or(err, unknown); err != nil {
		return 0, 0, fmt.Errorf("defragment etcd: %w", err)
	}
	return was.DbSize, is.DbSize, nil
}

// Alarms are those that members have raised; with disarm, it ends them first.
func (e *Etcd) Alarms(ctx context.Context, disarm bool) ([]*pb.AlarmMember, error) {
	c, err := e.local(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if disarm {
		if _, err := c.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
			return nil, fmt.Errorf("disarm the alarms of etcd: %w", err)
		}
	}
	found, err := c.AlarmList(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the alarms of etcd: %w", err)
	}
	return found.Alarms, nil
}

// ForfeitLeadership makes another member the leader, and returns its name; was
// is false if this node's member wasn't the leader.
func (e *Etcd) ForfeitLeadership(ctx context.Context) (leader string, was bool, err error) {
	c, found, err := e.askLocal(ctx)
	if err != nil {
		return "", false, err
	}
	defer c.Close()
	return forfeit(ctx, c, found)
}

func forfeit(ctx context.Context, c *clientv3.Client, found *clientv3.MemberListResponse) (leader string, was bool, err error) {
	own := found.Header.MemberId
	var next *MemberStatus
	for _, s := range statuses(ctx, c, found.Members) {
		if s.Err != nil || s.Member.IsLearner {
			continue
		}
		if s.Leader != 0 && s.Leader != own && s.Member.ID == own {
			at := slices.IndexFunc(found.Members, func(m *pb.Member) bool { return m.ID == s.Leader })
			if at < 0 {
				return HexID(s.Leader), false, nil
			}
			return called(found.Members[at]), false, nil
		}
		// The member with most of the log takes over at once.
		if s.Member.ID != own && (next == nil || s.RaftIndex > next.RaftIndex) {
			next = &s
		}
	}
	if next == nil {
		return "", true, refuse("no other voting member of etcd answers, so none can become the leader")
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, err := c.MoveLeader(ctx, next.Member.ID); err != nil {
		return "", true, fmt.Errorf("make etcd member %s the leader: %w", called(next.Member), err)
	}
	return called(next.Member), true, nil
}

// RemoveMember removes the member of a lost node from the cluster.
func (e *Etcd) RemoveMember(ctx context.Context, text string) (name string, err error) {
	id, err := parseID(text)
	if err != nil {
		return "", err
	}
	c, found, err := e.askLocal(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close()
	at := slices.IndexFunc(found.Members, func(m *pb.Member) bool { return m.ID == id })
	switch {
	case at < 0:
		return "", fmt.Errorf("remove etcd member %s: %w", HexID(id), ErrNoMember)
	case id == found.Header.MemberId:
		return "", refuse("etcd member %s is that of this node: it leaves in order with `gbctl etcd leave`", HexID(id))
	}
	return called(found.Members[at]), remove(ctx, c, found.Members, found.Members[at])
}

// A node with another address needs two things of etcd. The process listens at an address, so it starts anew by itself
// (whileAt). The list of the members has an address, too; nobody but Move changes that, because an administrator asks
// for it: an address may be wrong, or only for a while. A member goes on with an entry that is wrong: it connects to
// the others, and a single one to nobody.

// errMoved ends a run whose node has another address.
var errMoved = errors.New("the node's address has changed")

// whileAt returns once the node has another address than addr. One that is gone for the moment stays published.
func (e *Etcd) whileAt(ctx context.Context, addr netip.Addr) error {
	for range e.o.Store.Watch(ctx, network.Addresses.Type()) {
		if now, err := e.o.self(); err == nil && now.addr != addr {
			return fmt.Errorf("%w from %s to %s: etcd starts anew to listen there", errMoved, addr, now.addr)
		}
	}
	return nil
}

// MayMove says why this node's member can't have an address, or how many others there are.
func (e *Etcd) MayMove(ctx context.Context, to netip.Addr) (others int, err error) {
	return e.move(ctx, to, func(*clientv3.Client, *pb.Member) error { return nil })
}

// Move tells the cluster the address of this node's member. Done again, it changes nothing.
func (e *Etcd) Move(ctx context.Context, to netip.Addr) error {
	_, err := e.move(ctx, to, func(c *clientv3.Client, own *pb.Member) error {
		want := []string{self{addr: to}.peerURL()}
		if slices.Equal(own.PeerURLs, want) {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		if _, err := c.MemberUpdate(ctx, own.ID, want); err != nil {
			return fmt.Errorf("change the address of etcd member %s to %s: %w", called(own), want[0], err)
		}
		return nil
	})
	return err
}

// move calls do with this node's member, which the quorum knows.
func (e *Etcd) move(ctx context.Context, to netip.Addr, do func(*clientv3.Client, *pb.Member) error) (others int, err error) {
	cfg, err := configuration.Config(e.o.Store)
	if err != nil {
		return 0, err
	}
	if args := cfg.Cluster.Etcd.ExtraArgs; args.Get("initial-advertise-peer-urls")+args.Get("listen-peer-urls") != "" {
		return 0, refuse("cluster.etcd.extraArgs has peer URLs, so the configuration says where this member is")
	}
	c, found, err := e.askLocal(ctx)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	own := &pb.Member{} // it is one of them: it answers
	for _, m := range found.Members {
		if m.ID == found.Header.MemberId {
			own = m
		} else if slices.Contains(m.PeerURLs, self{addr: to}.peerURL()) {
			return 0, refuse("etcd member %s has the address %s", called(m), to)
		}
	}
	return len(found.Members) - 1, do(c, own)
}

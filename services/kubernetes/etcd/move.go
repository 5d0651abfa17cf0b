package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

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

package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrQuorum is why a member isn't removed.
var ErrQuorum = errors.New("the cluster would lose its quorum")

// ErrLast is why the last voting member isn't removed.
var ErrLast = errors.New("it is the last voting member: without it the cluster and its data are gone")

func parseID(text string) (uint64, error) {
	id, err := strconv.ParseUint(strings.TrimPrefix(text, "0x"), 16, 64)
	if err != nil {
		return 0, refuse("%q isn't the ID of an etcd member: it is hexadecimal, as `gbctl etcd members` shows it", text)
	}
	return id, nil
}

// remove takes a member out of the cluster, unless that would cost it its quorum.
func remove(ctx context.Context, c *clientv3.Client, members []*pb.Member, m *pb.Member) error {
	if err := mayRemove(members, m, answering(ctx, c, members)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for {
		_, err := c.MemberRemove(ctx, m.ID)
		if err == nil {
			return nil
		}
		// etcd doesn't count a member that it has seen for less than 5 s. We did.
		if !errors.Is(err, rpctypes.ErrUnhealthy) {
			return fmt.Errorf("remove etcd member %s: %w", called(m), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove etcd member %s: %w", called(m), err)
		case <-time.After(promoteRetry):
		}
	}
}

// mayRemove counts the voting members that are left without m, and those of them
// that answer. The error names them.
func mayRemove(members []*pb.Member, m *pb.Member, answers map[uint64]bool) error {
	if m.IsLearner {
		return nil
	}
	var well, silent []string
	for _, other := range members {
		switch {
		case other.IsLearner || other.ID == m.ID:
		case answers[other.ID]:
			well = append(well, called(other))
		default:
			silent = append(silent, called(other))
		}
	}
	left := len(well) + len(silent)
	if left == 0 {
		return refuse("remove etcd member %s: %w", called(m), ErrLast)
	}
	if need := left/2 + 1; len(well) < need {
		return refuse("remove etcd member %s: %w: of the %d voting members that are left, %d must answer, and %d do (%s); no answer from %s",
			called(m), ErrQuorum, left, need, len(well), orNone(well), orNone(silent))
	}
	return nil
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// answering asks all members, each by itself, whether they are there and know a
// leader.
func answering(ctx context.Context, c *clientv3.Client, members []*pb.Member) map[uint64]bool {
	answers := map[uint64]bool{}
	for _, s := range statuses(ctx, c, members) {
		answers[s.Member.ID] = s.Err == nil && s.Leader != 0 && !slices.Contains(s.Errors, errNoLeader)
	}
	return answers
}

// errNoLeader is what a member says of itself in its status.
const errNoLeader = "etcdserver: no leader"

// MemberStatus is a member of the cluster, and what it says of itself.
type MemberStatus struct {
	Member *pb.Member
	*clientv3.StatusResponse
	Err error // why it said nothing
}

func statuses(ctx context.Context, c *clientv3.Client, members []*pb.Member) []MemberStatus {
	all := make([]MemberStatus, len(members))
	var wg sync.WaitGroup
	for i, m := range members {
		all[i] = MemberStatus{Member: m, StatusResponse: &clientv3.StatusResponse{}, Err: errors.New("it never ran")}
		wg.Go(func() {
			for _, u := range m.ClientURLs {
				sctx, cancel := context.WithTimeout(ctx, statusTimeout)
				got, err := c.Status(sctx, u)
				cancel()
				if all[i].Err = err; err == nil {
					all[i].StatusResponse = got
					return
				}
			}
		})
	}
	wg.Wait()
	return all
}

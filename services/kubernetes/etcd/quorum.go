package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/services/core/sleep"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrQuorum is the reason why a member isn't removed, or its node isn't stopped.
var ErrQuorum = errors.New("the cluster would lose its quorum")

// ErrLast is the reason why the last voting member isn't removed.
var ErrLast = errors.New("it is the last voting member: without it the cluster and its data are gone")

func parseID(text string) (uint64, error) {
	id, err := strconv.ParseUint(strings.TrimPrefix(text, "0x"), 16, 64)
	if err != nil {
		return 0, refuse("%q isn't the ID of an etcd member: it is hexadecimal, as `gbctl etcd members` shows it", text)
	}
	return id, nil
}

// remove removes a member from the cluster, unless the cluster would lose its quorum.
func remove(ctx context.Context, c *clientv3.Client, members []*pb.Member, m *pb.Member) error {
	if err := mayRemove(members, m, answering(ctx, c, members)); err != nil {
		return err
	}
	return takeOut(ctx, c, m)
}

// takeOut removes a member after the caller has checked the quorum of the others.
func takeOut(ctx context.Context, c *clientv3.Client, m *pb.Member) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for {
		_, err := c.MemberRemove(ctx, m.ID)
		if err == nil {
			return nil
		}
		// etcd doesn't count a member that it has seen for less than 5 s. mayRemove does.
		if !errors.Is(err, rpctypes.ErrUnhealthy) || !sleep.For(ctx, promoteRetry) {
			return fmt.Errorf("remove etcd member %s: %w", called(m), err)
		}
	}
}

// mayRemove counts the remaining voting members without m, and those of them
// that answer. The error lists them.
func mayRemove(members []*pb.Member, m *pb.Member, answers map[uint64]bool) error {
	if m.IsLearner {
		return nil
	}
	left := without(m, members, answers)
	if left.count() == 0 {
		return refuse("remove etcd member %s: %w", called(m), ErrLast)
	}
	if need := quorum(left.count()); len(left.well) < need {
		return refuse("remove etcd member %s: %w: of the %d voting members that are left, %d must answer, and %s",
			called(m), ErrQuorum, left.count(), need, left)
	}
	return nil
}

// mayStop counts the voting members that answer while m is down. m stays a
// member, so the quorum is that of all members. A single member may always stop.
func mayStop(members []*pb.Member, m *pb.Member, answers map[uint64]bool) error {
	if m.IsLearner {
		return nil
	}
	left := without(m, members, answers)
	all := left.count() + 1
	if need := quorum(all); all > 1 && len(left.well) < need {
		return refuse("stop etcd member %s: %w: of its %d voting members, %d must answer, and without this one %s",
			called(m), ErrQuorum, all, need, left)
	}
	return nil
}

func quorum(voters int) int { return voters/2 + 1 }

// counted are the names of voting members, by whether they answer.
type counted struct{ well, silent []string }

// without counts all except m.
func without(m *pb.Member, members []*pb.Member, answers map[uint64]bool) (c counted) {
	for _, other := range members {
		switch {
		case other.IsLearner || other.ID == m.ID:
		case answers[other.ID]:
			c.well = append(c.well, called(other))
		default:
			c.silent = append(c.silent, called(other))
		}
	}
	return c
}

func (c counted) count() int { return len(c.well) + len(c.silent) }

func (c counted) String() string {
	text := fmt.Sprintf("%d do (%s)", len(c.well), cmp.Or(strings.Join(c.well, ", "), "none"))
	if len(c.silent) > 0 {
		text += "; no answer from " + strings.Join(c.silent, ", ")
	}
	return text
}

// answering asks each member whether it answers and knows a leader.
func answering(ctx context.Context, c *clientv3.Client, members []*pb.Member) map[uint64]bool {
	answers := map[uint64]bool{}
	for _, s := range statuses(ctx, c, members) {
		answers[s.Member.ID] = s.Err == nil && s.Leader != 0 && !slices.Contains(s.Errors, errNoLeader)
	}
	return answers
}

// errNoLeader is what a member reports in its status.
const errNoLeader = "etcdserver: no leader"

// MemberStatus is a member of the cluster, with its own status.
type MemberStatus struct {
	Member *pb.Member
	*clientv3.StatusResponse
	Err error // why it has no status
}

// statuses asks each member at its addresses. Another member may answer there: the
// rest of a removed one, or a learner that has since replaced it. That isn't counted.
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
				if err == nil && got.Header.GetMemberId() != m.ID {
					err = fmt.Errorf("member %s answers in its place at %s", HexID(got.Header.GetMemberId()), u)
				}
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

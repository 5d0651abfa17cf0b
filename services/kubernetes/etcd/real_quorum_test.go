//go:build e2e

package etcd

import (
	"errors"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/garboard-os/garboard/config"
)

// A member that answers at another member's address under another ID doesn't
// count as that one: it may be the rest of a removed one, or the learner that
// has replaced it, and isn't part of the quorum.
func TestRealAnotherMemberAnswersInItsPlace(t *testing.T) {
	t.Parallel()
	_, node := realRig(t)
	a := node("a", config.Init)
	ctx := t.Context()
	a.start()
	a.serves()
	c, err := Dial(ctx, a.o.Store, clientURL(a.addr))
	must(t, err)
	defer c.Close()
	own, ok, err := a.identity()
	if err != nil || !ok {
		t.Fatalf("its identity: %v, %v", ok, err)
	}
	itself := &pb.Member{ID: own.member, Name: "a", ClientURLs: []string{clientURL(a.addr)}}
	former := &pb.Member{ID: own.member + 1, Name: "former", ClientURLs: itself.ClientURLs}
	all := statuses(ctx, c, []*pb.Member{itself, former})
	if all[0].Err != nil || all[0].Version == "" {
		t.Errorf("itself: %+v", all[0])
	}
	if want := "member " + HexID(own.member) + " answers in its place at "; all[1].Err == nil || !strings.Contains(all[1].Err.Error(), want) || all[1].Version != "" {
		t.Errorf("the former one: %+v, want %q", all[1], want)
	}
	// Two members vote, and one of them answers twice: neither may go.
	voters := []*pb.Member{itself, former}
	if err := mayRemove(voters, itself, answering(ctx, c, voters)); !errors.Is(err, ErrQuorum) || !strings.Contains(err.Error(), "no answer from former") {
		t.Errorf("removed, counting on one that doesn't answer: %v", err)
	}
	if err := mayRemove(voters, former, answering(ctx, c, voters)); err != nil {
		t.Errorf("the one that is gone can't be removed: %v", err)
	}
}

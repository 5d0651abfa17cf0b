package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

type etcdService struct {
	garboardv1connect.UnimplementedEtcdServiceHandler
	node *node
}

var etcdMembers = []*apiv1.EtcdMember{
	{Id: "a1", Name: "cp-1", PeerUrls: []string{"https://10.5.0.2:2380"}, ClientUrls: []string{"https://10.5.0.2:2379"}},
	{Id: "b2", Name: "cp-2", PeerUrls: []string{"https://10.5.0.3:2380"}, ClientUrls: []string{"https://10.5.0.3:2379"}},
	{Id: "c3", PeerUrls: []string{"https://10.5.0.9:2380"}, Learner: true},
}

func (s etcdService) Bootstrap(_ context.Context, r *connect.Request[apiv1.BootstrapRequest]) (*connect.Response[apiv1.BootstrapResponse], error) {
	said := "the cluster begins on this node"
	if told := r.Msg.ControlPlanes; len(told) > 0 {
		said += ", told of " + strings.Join(told, ", ")
	}
	return answerWith(&apiv1.BootstrapResponse{Message: said, Token: "t"})
}

func (s etcdService) Recover(_ context.Context, stream *connect.ClientStream[apiv1.RecoverRequest]) (*connect.Response[apiv1.BootstrapResponse], error) {
	stream.Receive()
	first := stream.Msg()
	want, said := first.Size, fmt.Sprintf("restored %d bytes", first.Size)
	if first.SkipHashCheck {
		said += " without its sum"
	}
	said += ", told of " + strings.Join(first.ControlPlanes, ", ")
	sum, got := sha256.New(), uint64(0)
	for stream.Receive() {
		sum.Write(stream.Msg().Data)
		got += uint64(len(stream.Msg().Data))
	}
	if stream.Err() != nil || got != want || !bytes.Equal(sum.Sum(nil), first.Sha256) {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%d bytes of %d came, %w", got, want, stream.Err()))
	}
	return answerWith(&apiv1.BootstrapResponse{Message: said})
}

func (s etcdService) Members(context.Context, *connect.Request[apiv1.EtcdMembersRequest]) (*connect.Response[apiv1.EtcdMembersResponse], error) {
	return answerWith(&apiv1.EtcdMembersResponse{ClusterId: "cdf8", Members: etcdMembers})
}

func (s etcdService) Status(context.Context, *connect.Request[apiv1.EtcdStatusRequest]) (*connect.Response[apiv1.EtcdStatusResponse], error) {
	return answerWith(&apiv1.EtcdStatusResponse{Members: []*apiv1.EtcdMemberStatus{
		{Member: etcdMembers[0], Version: "3.6.8", Leader: true, Size: 20 << 20, SizeInUse: 5 << 20, RaftTerm: 2, RaftIndex: 1000, AppliedIndex: 1000},
		{Member: etcdMembers[1], Version: "3.6.8", Size: 20 << 20, SizeInUse: 5 << 20, RaftTerm: 2, RaftIndex: 999, AppliedIndex: 999, Problems: []string{"memberID:178 alarm:NOSPACE"}},
		{Member: etcdMembers[2], Error: "it never ran"},
	}})
}

// Snapshot sends a database, which arrives whole unless the script has said
// otherwise.
func (s etcdService) Snapshot(_ context.Context, _ *connect.Request[apiv1.EtcdSnapshotRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	database := bytes.Repeat([]byte("database"), 1000)
	sum := sha256.Sum256(database)
	if s.node.is("lossy") {
		database = database[8:]
	}
	for chunk := range slices.Chunk(append(database, sum[:]...), 3001) {
		if err := stream.Send(&apiv1.FileChunk{Data: chunk}); err != nil {
			return err
		}
	}
	return nil
}

func (s etcdService) Defragment(context.Context, *connect.Request[apiv1.EtcdDefragmentRequest]) (*connect.Response[apiv1.EtcdDefragmentResponse], error) {
	return answerWith(&apiv1.EtcdDefragmentResponse{SizeBefore: 20 << 20, SizeAfter: 5 << 20})
}

func (s etcdService) Alarms(context.Context, *connect.Request[apiv1.EtcdAlarmsRequest]) (*connect.Response[apiv1.EtcdAlarmsResponse], error) {
	return answerWith(&apiv1.EtcdAlarmsResponse{Alarms: []*apiv1.EtcdAlarm{{Member: "b2", Alarm: "NOSPACE"}}})
}

func (s etcdService) DisarmAlarms(context.Context, *connect.Request[apiv1.EtcdDisarmAlarmsRequest]) (*connect.Response[apiv1.EtcdAlarmsResponse], error) {
	return answerWith(&apiv1.EtcdAlarmsResponse{})
}

func (s etcdService) ForfeitLeadership(context.Context, *connect.Request[apiv1.EtcdForfeitLeadershipRequest]) (*connect.Response[apiv1.EtcdForfeitLeadershipResponse], error) {
	return answerWith(&apiv1.EtcdForfeitLeadershipResponse{Message: "etcd member cp-2 (b2) leads now"})
}

func (s etcdService) RemoveMember(_ context.Context, r *connect.Request[apiv1.EtcdRemoveMemberRequest]) (*connect.Response[apiv1.EtcdRemoveMemberResponse], error) {
	if r.Msg.Id == "b2" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("remove etcd member cp-2 (b2): the cluster would lose its quorum"))
	}
	return answerWith(&apiv1.EtcdRemoveMemberResponse{Message: "etcd member " + r.Msg.Id + " is removed"})
}

func (s etcdService) Leave(context.Context, *connect.Request[apiv1.EtcdLeaveRequest]) (*connect.Response[apiv1.EtcdLeaveResponse], error) {
	return answerWith(&apiv1.EtcdLeaveResponse{Message: "etcd member cp-1 (a1) has left"})
}

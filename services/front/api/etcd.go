package api

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// etcdService is this node's member of etcd.
type etcdService struct {
	member     *etcd.Etcd
	operations *operation.Runner
}

// etcdError has the code on which a client decides. A deadline is mostly that of etcd
// without a quorum.
func etcdError(err error) error {
	text := errors.New(readable(err.Error()))
	switch {
	case errors.As(err, new(etcd.Refusal)):
		return connect.NewError(connect.CodeFailedPrecondition, text)
	case errors.Is(err, etcd.ErrNoMember):
		return connect.NewError(connect.CodeNotFound, text)
	case errors.Is(err, context.DeadlineExceeded):
		return failed(connect.CodeUnavailable, "%w: etcd doesn't run here, or has no quorum; see `gbctl etcd status`", text)
	}
	return connect.NewError(connect.CodeUnavailable, text)
}

func (s *etcdService) Bootstrap(ctx context.Context, req *connect.Request[apiv1.BootstrapRequest]) (*connect.Response[apiv1.BootstrapResponse], error) {
	told := req.Msg.GetControlPlanes()
	begun, err := s.member.MayBootstrap(ctx, told)
	if err != nil {
		return nil, err
	}
	if begun == nil {
		ask := operation.Ask{Name: etcd.BootstrapOperation, Arguments: etcd.BootstrapArguments{ControlPlanes: told}}
		if begun, err = s.begin(ctx, ask, etcd.BeginStep); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(bootstrapped(begun, "the cluster begins on this node", "the cluster has begun on this node already: nothing is to be done")), nil
}

// bootstrapped has the cluster's ID, too: a second request shows that it is the same
// cluster.
func bootstrapped(begun *etcd.Begun, now, already string) *apiv1.BootstrapResponse {
	message := now
	if begun.Already {
		message = already
	}
	message += "; cluster ID " + begun.Token
	if begun.Cluster != "" {
		message += ", in etcd " + begun.Cluster
	}
	return &apiv1.BootstrapResponse{Message: message, Already: begun.Already, Token: begun.Token}
}

func (s *etcdService) Recover(ctx context.Context, stream *connect.ClientStream[apiv1.RecoverRequest]) (*connect.Response[apiv1.BootstrapResponse], error) {
	if !stream.Receive() {
		return nil, cmp.Or(stream.Err(), failed(connect.CodeInvalidArgument, "recover: nothing was sent"))
	}
	first := stream.Msg()
	if len(first.GetSha256()) != sha256.Size {
		return nil, failed(connect.CodeInvalidArgument, "recover: sha256 has %d bytes, not %d", len(first.GetSha256()), sha256.Size)
	}
	snapshot := etcd.Snapshot{
		Size: first.GetSize(), SHA256: [sha256.Size]byte(first.GetSha256()), Raw: first.GetSkipHashCheck(), ControlPlanes: first.GetControlPlanes(),
	}
	already, release, err := s.member.Receive(ctx, snapshot, &received{stream: stream, rest: first.GetData()})
	if err != nil {
		return nil, err
	}
	begun := already
	if begun == nil {
		arguments := etcd.RecoverArguments{SHA256: hex.EncodeToString(first.GetSha256()), Raw: snapshot.Raw, ControlPlanes: snapshot.ControlPlanes}
		defer release()
		if begun, err = s.begin(ctx, operation.Ask{Name: etcd.RecoverOperation, Arguments: arguments}, etcd.RestoreStep); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(bootstrapped(begun, "the snapshot is restored: a new cluster begins on this node",
		"the cluster has begun on this node from this snapshot already: nothing is to be done")), nil
}

// begin starts an operation, and waits until the cluster has begun with its step.
func (s *etcdService) begin(ctx context.Context, a operation.Ask, step string) (*etcd.Begun, error) {
	if _, err := s.operate(ctx, a, step); err != nil {
		return nil, err
	}
	return s.member.Begun()
}

// errStepDone ends the watch of an operation.
var errStepDone = errors.New("the step is done")

// operate starts an operation, and waits until the step is done; "": until its end. If
// the caller goes, the operation continues.
func (s *etcdService) operate(ctx context.Context, a operation.Ask, step string) (operation.Operation, error) {
	a.By = asked(ctx)
	o, err := s.operations.Start(ctx, a)
	if err != nil {
		return o, operationError(err)
	}
	err = s.operations.Watch(ctx, o.ID, 0, func(u operation.Update) error {
		o = u.Operation
		if slices.ContainsFunc(o.Steps, func(s operation.Status) bool { return s.ID == step && s.State == operation.Done }) {
			return errStepDone
		}
		return nil
	})
	switch {
	case errors.Is(err, errStepDone), err == nil && o.State == operation.Done:
		return o, nil
	case err == nil:
		return o, failed(connect.CodeFailedPrecondition, "%s %s: %s", o.ID, o.State, readable(o.Error))
	}
	return o, failed(connect.CodeUnavailable, "%s continues on the node: gbctl operation attach %s", o.ID, o.ID)
}

// received is what a stream brings, as a reader.
type received struct {
	stream *connect.ClientStream[apiv1.RecoverRequest]
	rest   []byte
}

func (r *received) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if !r.stream.Receive() {
			if err := r.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		r.rest = r.stream.Msg().GetData()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (s *etcdService) Beginning(ctx context.Context, _ *connect.Request[apiv1.BeginningRequest]) (*connect.Response[apiv1.BeginningResponse], error) {
	m, err := s.member.Beginning()
	if c := callOf(ctx); err == nil && slices.Contains(c.roles, string(contract.Peer)) {
		err = s.member.Meet(c.remote)
	}
	return connect.NewResponse(m), err
}

func etcdMember(m *pb.Member) *apiv1.EtcdMember {
	return &apiv1.EtcdMember{
		Id: etcd.HexID(m.ID), Name: readable(m.Name), PeerUrls: m.PeerURLs, ClientUrls: m.ClientURLs, Learner: m.IsLearner,
	}
}

func (s *etcdService) Members(ctx context.Context, _ *connect.Request[apiv1.EtcdMembersRequest]) (*connect.Response[apiv1.EtcdMembersResponse], error) {
	cluster, members, err := s.member.Members(ctx)
	return connect.NewResponse(&apiv1.EtcdMembersResponse{ClusterId: cluster, Members: lists.Of(members, etcdMember)}), err
}

func (s *etcdService) Status(ctx context.Context, _ *connect.Request[apiv1.EtcdStatusRequest]) (*connect.Response[apiv1.EtcdStatusResponse], error) {
	statuses, err := s.member.Status(ctx)
	res := &apiv1.EtcdStatusResponse{}
	for _, st := range statuses {
		m := &apiv1.EtcdMemberStatus{Member: etcdMember(st.Member)}
		res.Members = append(res.Members, m)
		if st.Err != nil {
			m.Error = readable(st.Err.Error())
			continue
		}
		m.Version, m.Leader = readable(st.Version), st.Leader == st.Member.ID
		m.Size, m.SizeInUse = uint64(st.DbSize), uint64(st.DbSizeInUse)
		m.RaftTerm, m.RaftIndex, m.AppliedIndex = st.RaftTerm, st.RaftIndex, st.RaftAppliedIndex
		m.Problems = lists.Of(st.Errors, readable)
	}
	return connect.NewResponse(res), err
}

func (s *etcdService) Snapshot(ctx context.Context, _ *connect.Request[apiv1.EtcdSnapshotRequest], stream *connect.ServerStream[apiv1.FileChunk]) error {
	out := bufio.NewWriterSize(chunks{stream}, fileChunk)
	if err := s.member.Snapshot(ctx, out); err != nil {
		return err
	}
	return out.Flush()
}

func (s *etcdService) Defragment(ctx context.Context, _ *connect.Request[apiv1.EtcdDefragmentRequest]) (*connect.Response[apiv1.EtcdDefragmentResponse], error) {
	before, after, err := s.member.Defragment(ctx)
	return connect.NewResponse(&apiv1.EtcdDefragmentResponse{SizeBefore: uint64(before), SizeAfter: uint64(after)}), err
}

func (s *etcdService) Alarms(ctx context.Context, _ *connect.Request[apiv1.EtcdAlarmsRequest]) (*connect.Response[apiv1.EtcdAlarmsResponse], error) {
	return s.alarms(ctx, false)
}

func (s *etcdService) DisarmAlarms(ctx context.Context, _ *connect.Request[apiv1.EtcdDisarmAlarmsRequest]) (*connect.Response[apiv1.EtcdAlarmsResponse], error) {
	return s.alarms(ctx, true)
}

func (s *etcdService) alarms(ctx context.Context, disarm bool) (*connect.Response[apiv1.EtcdAlarmsResponse], error) {
	found, err := s.member.Alarms(ctx, disarm)
	res := &apiv1.EtcdAlarmsResponse{}
	for _, a := range found {
		res.Alarms = append(res.Alarms, &apiv1.EtcdAlarm{Member: etcd.HexID(a.MemberID), Alarm: a.Alarm.String()})
	}
	return connect.NewResponse(res), err
}

func (s *etcdService) ForfeitLeadership(ctx context.Context, _ *connect.Request[apiv1.EtcdForfeitLeadershipRequest]) (*connect.Response[apiv1.EtcdForfeitLeadershipResponse], error) {
	leader, was, err := s.member.ForfeitLeadership(ctx)
	message := fmt.Sprintf("etcd member %s leads now", leader)
	if !was {
		message = fmt.Sprintf("this node's member doesn't lead: %s does", leader)
	}
	return connect.NewResponse(&apiv1.EtcdForfeitLeadershipResponse{Message: readable(message)}), err
}

func (s *etcdService) RemoveMember(ctx context.Context, req *connect.Request[apiv1.EtcdRemoveMemberRequest]) (*connect.Response[apiv1.EtcdRemoveMemberResponse], error) {
	name, err := s.member.RemoveMember(ctx, readable(req.Msg.GetId()))
	return connect.NewResponse(&apiv1.EtcdRemoveMemberResponse{Message: readable(fmt.Sprintf("etcd member %s is removed", name))}), err
}

func (s *etcdService) Leave(ctx context.Context, _ *connect.Request[apiv1.EtcdLeaveRequest]) (*connect.Response[apiv1.EtcdLeaveResponse], error) {
	// Without an answer of the cluster, the caller may try again.
	if err := s.member.MayLeave(ctx, 0); err != nil {
		return nil, err
	}
	o, err := s.operate(ctx, operation.Ask{Name: etcd.LeaveOperation}, "")
	if err != nil {
		return nil, err
	}
	message := "the etcd member of this node has left, its data is removed, and service etcd is stopped; it joins again when it is started"
	if o.Steps[len(o.Steps)-1].State == operation.Skipped {
		message = "this node has no member of etcd that could leave"
	}
	return connect.NewResponse(&apiv1.EtcdLeaveResponse{Message: readable(message)}), nil
}

package api

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/convertk8s"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/operations/readdress"
	"github.com/garboard-os/garboard/services/operations/reendpoint"
	"github.com/garboard-os/garboard/services/operations/rotateca"
	"github.com/garboard-os/garboard/services/operations/upgradek8s"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// operationService is the operations of this node, whatever they are.
type operationService struct{ opts Options }

// operationError has the code on which a client decides.
func operationError(err error) error {
	text := errors.New(readable(err.Error()))
	switch {
	case errors.As(err, new(operation.Refusal)):
		return connect.NewError(connect.CodeFailedPrecondition, text)
	case errors.Is(err, operation.ErrNotFound):
		return connect.NewError(connect.CodeNotFound, text)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return connect.NewError(connect.CodeUnavailable, text)
}

// elsewhereTimeout bounds how long a list waits for etcd: it must answer where etcd has no
// quorum.
const elsewhereTimeout = 3 * time.Second

func (s *operationService) List(ctx context.Context, _ *connect.Request[apiv1.ListOperationsRequest]) (*connect.Response[apiv1.ListOperationsResponse], error) {
	all, err := s.opts.Operations.List()
	if err != nil && len(all) == 0 {
		return nil, err
	}
	res := &apiv1.ListOperationsResponse{}
	ctx, cancel := context.WithTimeout(ctx, elsewhereTimeout)
	defer cancel()
	others, err := s.opts.Operations.Elsewhere(ctx)
	if err != nil {
		res.Warning = readable("the operations of other nodes can't be read from etcd: " + err.Error())
	}
	res.Operations = lists.Of(slices.Concat(all, others), operationMessage)
	return connect.NewResponse(res), nil
}

func (s *operationService) Watch(ctx context.Context, req *connect.Request[apiv1.WatchOperationRequest], stream *connect.ServerStream[apiv1.OperationUpdate]) error {
	return s.opts.Operations.Watch(ctx, req.Msg.GetId(), req.Msg.GetAfter(), func(u operation.Update) error {
		m := &apiv1.OperationUpdate{Operation: operationMessage(u.Operation), Lost: u.Lost}
		for _, e := range u.Events {
			m.Events = append(m.Events, &apiv1.OperationEvent{
				Cursor: e.Cursor, Time: timestamppb.New(e.Time), Kind: enum[apiv1.OperationEvent_Kind](apiv1.OperationEvent_Kind_value, "KIND_", e.Kind),
				Step: e.Step, Part: e.Part, State: string(e.State), Text: readable(e.Text),
			})
		}
		return stream.Send(m)
	})
}

func (s *operationService) Answer(ctx context.Context, req *connect.Request[apiv1.AnswerOperationRequest]) (*connect.Response[apiv1.AnswerOperationResponse], error) {
	if err := s.permitHere(ctx, "answer", req.Msg.GetId()); err != nil {
		return nil, err
	}
	err := s.opts.Operations.Answer(req.Msg.GetId(), req.Msg.GetQuestion(), req.Msg.GetAnswer(), asked(ctx))
	return connect.NewResponse(&apiv1.AnswerOperationResponse{}), err
}

func (s *operationService) Abort(ctx context.Context, req *connect.Request[apiv1.AbortOperationRequest]) (*connect.Response[apiv1.AbortOperationResponse], error) {
	id := req.Msg.GetId()
	if err := s.permitHere(ctx, "abort", id); err != nil {
		return nil, err
	}
	err := s.opts.Operations.Abort(id, asked(ctx))
	return connect.NewResponse(&apiv1.AbortOperationResponse{Message: readable(id) + " is aborted; what it did is undone where that is possible: gbctl operation attach " + readable(id)}), err
}

func (s *operationService) TakeOver(ctx context.Context, req *connect.Request[apiv1.TakeOverOperationRequest]) (*connect.Response[apiv1.TakeOverOperationResponse], error) {
	permit := func(o operation.Operation) error { return permit(ctx, "take over", o) }
	o, err := s.opts.Operations.TakeOver(ctx, req.Msg.GetId(), asked(ctx), permit)
	if denied := new(connect.Error); errors.As(err, &denied) {
		return nil, denied
	} else if err != nil {
		return nil, err
	}
	return connect.NewResponse(&apiv1.TakeOverOperationResponse{Operation: operationMessage(o)}), nil
}

// permitHere refuses a caller without the role for this operation of the node.
func (s *operationService) permitHere(ctx context.Context, verb, id string) error {
	o, err := s.opts.Operations.Get(id)
	if err != nil {
		return err
	}
	return permit(ctx, verb, o)
}

// permit refuses a caller without the role for the operation.
func permit(ctx context.Context, verb string, o operation.Operation) error {
	role := contract.Role(cmp.Or(o.Role, string(contract.Admin)))
	if caller := callOf(ctx); !contract.Allowed(contract.Method{Role: role}, caller.roles) {
		return failed(connect.CodePermissionDenied, "%s %s: this takes role %s; the certificate of %q has %s", verb, o.ID, role, caller.peer, listed(caller.roles))
	}
	return nil
}

// enum is the value of an enumeration for a name that the node uses.
func enum[E ~int32, W ~string](values map[string]int32, prefix string, word W) E {
	return E(values[prefix+strings.ToUpper(strings.ReplaceAll(string(word), "-", "_"))])
}

func operationMessage(o operation.Operation) *apiv1.Operation {
	m := &apiv1.Operation{
		Id: o.ID, Name: o.Name, State: enum[apiv1.Operation_State](apiv1.Operation_State_value, "STATE_", o.State), By: readable(o.By), Began: timestamp(o.Began), Ended: timestamp(o.Ended),
		Error: readable(o.Error), Role: cmp.Or(o.Role, string(contract.Admin)), Warnings: lists.Of(o.Warnings, readable),
		Coordinator: readable(o.Coordinator), Elsewhere: o.Elsewhere, Orphaned: o.Orphaned,
	}
	for _, s := range o.Steps {
		m.Steps = append(m.Steps, &apiv1.OperationStep{
			Id: s.ID, What: readable(s.What), State: enum[apiv1.OperationStep_State](apiv1.OperationStep_State_value, "STATE_", s.State), Reason: readable(s.Reason), Deadline: durationpb.New(s.Deadline),
			Optional: s.Optional, PointOfNoReturn: s.PointOfNoReturn, Began: timestamp(s.Began), Ended: timestamp(s.Ended),
			Parts: lists.Of(s.Parts, partMessage),
		})
	}
	if q := o.Question; q != nil {
		m.Question = &apiv1.OperationQuestion{
			Id: q.ID, Step: q.Step, Text: readable(q.Text), Options: q.Options, Default: q.Default,
			Since: timestamp(q.Since), Timeout: durationpb.New(q.Timeout),
		}
	}
	return m
}

func partMessage(p operation.PartStatus) *apiv1.OperationPart {
	return &apiv1.OperationPart{
		Id: p.ID, What: readable(p.What), State: enum[apiv1.OperationStep_State](apiv1.OperationStep_State_value, "STATE_", p.State), Reason: readable(p.Reason), Text: readable(p.Text),
		Began: timestamp(p.Began), Ended: timestamp(p.Ended),
	}
}

func (s *operationService) Reboot(ctx context.Context, req *connect.Request[apiv1.RebootRequest]) (*connect.Response[apiv1.RebootResponse], error) {
	o, err := s.operate(ctx, lifecycle.Reboot, req.Msg)
	return connect.NewResponse(&apiv1.RebootResponse{Operation: o}), err
}

func (s *operationService) Shutdown(ctx context.Context, req *connect.Request[apiv1.ShutdownRequest]) (*connect.Response[apiv1.ShutdownResponse], error) {
	o, err := s.operate(ctx, lifecycle.Shutdown, req.Msg)
	return connect.NewResponse(&apiv1.ShutdownResponse{Operation: o}), err
}

func (s *operationService) InstallSystem(ctx context.Context, req *connect.Request[apiv1.InstallSystemRequest]) (*connect.Response[apiv1.InstallSystemResponse], error) {
	o, err := s.operate(ctx, lifecycle.Install, req.Msg)
	return connect.NewResponse(&apiv1.InstallSystemResponse{Operation: o}), err
}

func (s *operationService) UpgradeSystem(ctx context.Context, req *connect.Request[apiv1.UpgradeSystemRequest]) (*connect.Response[apiv1.UpgradeSystemResponse], error) {
	m := req.Msg
	if m.GetWipe() && (m.GetForce() || m.GetStage()) {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("--preserve=false leaves the cluster in order, and restarts the node: not with --force or --stage"))
	}
	o, err := s.operate(ctx, lifecycle.Upgrade, m)
	return connect.NewResponse(&apiv1.UpgradeSystemResponse{Operation: o}), err
}

func (s *operationService) RollbackSystem(ctx context.Context, req *connect.Request[apiv1.RollbackSystemRequest]) (*connect.Response[apiv1.RollbackSystemResponse], error) {
	o, err := s.operate(ctx, lifecycle.Rollback, req.Msg)
	return connect.NewResponse(&apiv1.RollbackSystemResponse{Operation: o}), err
}

func (s *operationService) Reset(ctx context.Context, req *connect.Request[apiv1.ResetRequest]) (*connect.Response[apiv1.ResetResponse], error) {
	o, err := s.operate(ctx, lifecycle.Reset, req.Msg)
	return connect.NewResponse(&apiv1.ResetResponse{Operation: o}), err
}

func (s *operationService) UpgradeKubernetes(ctx context.Context, req *connect.Request[apiv1.UpgradeKubernetesRequest]) (*connect.Response[apiv1.UpgradeKubernetesResponse], error) {
	m := req.Msg
	m.From, m.To = versionTag(m.GetFrom()), versionTag(m.GetTo())
	if err := config.CheckKubernetesVersion(m.To); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if m.From == "" {
		var err error
		if m.From, err = s.opts.KubernetesVersion(ctx, m.To); err != nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, err)
		}
	}
	o, err := s.operate(ctx, upgradek8s.Name, m)
	return connect.NewResponse(&apiv1.UpgradeKubernetesResponse{Operation: o}), err
}

func (s *operationService) ConvertKubernetes(ctx context.Context, req *connect.Request[apiv1.ConvertKubernetesRequest]) (*connect.Response[apiv1.ConvertKubernetesResponse], error) {
	o, err := s.operate(ctx, convertk8s.Name, req.Msg)
	return connect.NewResponse(&apiv1.ConvertKubernetesResponse{Operation: o}), err
}

func (s *operationService) RotateCA(ctx context.Context, req *connect.Request[apiv1.RotateCARequest]) (*connect.Response[apiv1.RotateCAResponse], error) {
	o, err := s.operate(ctx, rotateca.Name, req.Msg)
	return connect.NewResponse(&apiv1.RotateCAResponse{Operation: o}), err
}

func (s *operationService) Readdress(ctx context.Context, req *connect.Request[apiv1.ReaddressRequest]) (*connect.Response[apiv1.ReaddressResponse], error) {
	if _, err := netip.ParseAddr(req.Msg.GetAddress()); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	o, err := s.operate(ctx, readdress.Name, req.Msg)
	return connect.NewResponse(&apiv1.ReaddressResponse{Operation: o}), err
}

func (s *operationService) SetEndpoint(ctx context.Context, req *connect.Request[apiv1.SetEndpointRequest]) (*connect.Response[apiv1.SetEndpointResponse], error) {
	o, err := s.operate(ctx, reendpoint.Name, req.Msg)
	return connect.NewResponse(&apiv1.SetEndpointResponse{Operation: o}), err
}

// versionTag is a version as the tags of images have it.
func versionTag(version string) string {
	if version == "" || strings.HasPrefix(version, "v") {
		return version
	}
	return "v" + version
}

// operate begins an operation, or only shows its plan.
func (s *operationService) operate(ctx context.Context, name string, m interface {
	proto.Message
	GetDryRun() bool
}) (*apiv1.Operation, error) {
	if system, ok := m.(interface{ GetImage() string }); ok && system.GetImage() != "" {
		if err := config.CheckImage(system.GetImage()); err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	o, err := s.opts.Operations.Start(ctx, operation.Ask{Name: name, Arguments: m, By: asked(ctx), DryRun: m.GetDryRun()})
	return operationMessage(o), err
}

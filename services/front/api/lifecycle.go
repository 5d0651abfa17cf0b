package api

import (
	"context"
	"errors"
	"net/netip"
	"strings"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/convertk8s"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/operations/readdress"
	"github.com/garboard-os/garboard/services/operations/reendpoint"
	"github.com/garboard-os/garboard/services/operations/rotateca"
	"github.com/garboard-os/garboard/services/operations/upgradek8s"
	"google.golang.org/protobuf/types/known/durationpb"
)

func (s *nodeService) Reboot(ctx context.Context, req *connect.Request[apiv1.RebootRequest]) (*connect.Response[apiv1.RebootResponse], error) {
	o, err := s.operate(ctx, lifecycle.Reboot, powerArguments(req.Msg), req.Msg.GetDryRun())
	return connect.NewResponse(&apiv1.RebootResponse{Operation: o}), err
}

func (s *nodeService) Shutdown(ctx context.Context, req *connect.Request[apiv1.ShutdownRequest]) (*connect.Response[apiv1.ShutdownResponse], error) {
	o, err := s.operate(ctx, lifecycle.Shutdown, powerArguments(req.Msg), req.Msg.GetDryRun())
	return connect.NewResponse(&apiv1.ShutdownResponse{Operation: o}), err
}

func (s *nodeService) InstallSystem(ctx context.Context, req *connect.Request[apiv1.InstallSystemRequest]) (*connect.Response[apiv1.InstallSystemResponse], error) {
	o, err := s.system(ctx, lifecycle.Install, req.Msg, lifecycle.PowerArguments{})
	return connect.NewResponse(&apiv1.InstallSystemResponse{Operation: o}), err
}

func (s *nodeService) UpgradeSystem(ctx context.Context, req *connect.Request[apiv1.UpgradeSystemRequest]) (*connect.Response[apiv1.UpgradeSystemResponse], error) {
	m := req.Msg
	if m.GetWipe() && (m.GetForce() || m.GetStage()) {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("--preserve=false leaves the cluster in order, and restarts the node: not with --force or --stage"))
	}
	o, err := s.system(ctx, lifecycle.Upgrade, m, lifecycle.PowerArguments{Stage: m.GetStage(), Wipe: m.GetWipe()})
	return connect.NewResponse(&apiv1.UpgradeSystemResponse{Operation: o}), err
}

func (s *nodeService) RollbackSystem(ctx context.Context, req *connect.Request[apiv1.RollbackSystemRequest]) (*connect.Response[apiv1.RollbackSystemResponse], error) {
	o, err := s.operate(ctx, lifecycle.Rollback, powerArguments(req.Msg), req.Msg.GetDryRun())
	return connect.NewResponse(&apiv1.RollbackSystemResponse{Operation: o}), err
}

// system starts an operation that brings another system.
func (s *nodeService) system(ctx context.Context, name string, m interface {
	power
	GetImage() string
	GetAllowOlder() bool
	GetDryRun() bool
}, own lifecycle.PowerArguments) (*apiv1.Operation, error) {
	arguments := powerArguments(m)
	arguments.Stage, arguments.Wipe, arguments.Older = own.Stage, own.Wipe, m.GetAllowOlder()
	if arguments.Image = m.GetImage(); arguments.Image != "" {
		if err := config.CheckImage(arguments.Image); err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	return s.operate(ctx, name, arguments, m.GetDryRun())
}

// power has the fields that all requests to end a node have.
type power interface {
	GetForce() bool
	GetKeepPods() bool
	GetDrainTimeout() *durationpb.Duration
}

func powerArguments(m power) lifecycle.PowerArguments {
	return lifecycle.PowerArguments{Force: m.GetForce(), KeepPods: m.GetKeepPods(), DrainTimeout: m.GetDrainTimeout().AsDuration()}
}

func (s *nodeService) Reset(ctx context.Context, req *connect.Request[apiv1.ResetRequest]) (*connect.Response[apiv1.ResetResponse], error) {
	m := req.Msg
	// The journal has them as they are now: names may change with a restart.
	users, err := s.opts.UserDisks(m.GetUserDisksToWipe())
	if err != nil {
		return nil, failed(connect.CodeFailedPrecondition, "reset: --user-disks-to-wipe: %w", err)
	}
	arguments := lifecycle.ResetArguments{
		Force: m.GetForce(), Reboot: m.GetReboot(), Wipe: m.GetSystemLabelsToWipe(), DrainTimeout: m.GetDrainTimeout().AsDuration(),
		Disks: users,
	}
	o, err := s.operate(ctx, lifecycle.Reset, arguments, m.GetDryRun())
	return connect.NewResponse(&apiv1.ResetResponse{Operation: o}), err
}

func (s *nodeService) UpgradeKubernetes(ctx context.Context, req *connect.Request[apiv1.UpgradeKubernetesRequest]) (*connect.Response[apiv1.UpgradeKubernetesResponse], error) {
	m := req.Msg
	a := upgradek8s.Arguments{From: versionTag(m.GetFrom()), To: versionTag(m.GetTo()), NoKubelet: m.GetNoKubelet(), Yes: m.GetYes()}
	if err := config.CheckKubernetesVersion(a.To); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if a.From == "" {
		var err error
		if a.From, err = s.opts.KubernetesVersion(ctx, a.To); err != nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, err)
		}
	}
	o, err := s.operate(ctx, upgradek8s.Name, a, m.GetDryRun())
	return connect.NewResponse(&apiv1.UpgradeKubernetesResponse{Operation: o}), err
}

func (s *nodeService) ConvertKubernetes(ctx context.Context, req *connect.Request[apiv1.ConvertKubernetesRequest]) (*connect.Response[apiv1.ConvertKubernetesResponse], error) {
	m := req.Msg
	a := convertk8s.Arguments{Yes: m.GetYes(), RemoveCheckpoints: m.GetRemoveCheckpoints(), OnlyKey: m.GetRemoveInitializedKey()}
	o, err := s.operate(ctx, convertk8s.Name, a, m.GetDryRun())
	return connect.NewResponse(&apiv1.ConvertKubernetesResponse{Operation: o}), err
}

func (s *nodeService) RotateCA(ctx context.Context, req *connect.Request[apiv1.RotateCARequest]) (*connect.Response[apiv1.RotateCAResponse], error) {
	a := rotateca.Arguments{Authorities: req.Msg.GetAuthorities()}
	o, err := s.operate(ctx, rotateca.Name, a, req.Msg.GetDryRun())
	return connect.NewResponse(&apiv1.RotateCAResponse{Operation: o}), err
}

func (s *nodeService) Readdress(ctx context.Context, req *connect.Request[apiv1.ReaddressRequest]) (*connect.Response[apiv1.ReaddressResponse], error) {
	to, err := netip.ParseAddr(req.Msg.GetAddress())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	o, err := s.operate(ctx, readdress.Name, readdress.Arguments{Address: to, Patch: string(req.Msg.GetPatch())}, req.Msg.GetDryRun())
	return connect.NewResponse(&apiv1.ReaddressResponse{Operation: o}), err
}

func (s *nodeService) SetEndpoint(ctx context.Context, req *connect.Request[apiv1.SetEndpointRequest]) (*connect.Response[apiv1.SetEndpointResponse], error) {
	o, err := s.operate(ctx, reendpoint.Name, reendpoint.Arguments{Endpoint: req.Msg.GetEndpoint()}, req.Msg.GetDryRun())
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
func (s *nodeService) operate(ctx context.Context, name string, arguments any, dryRun bool) (*apiv1.Operation, error) {
	o, err := s.opts.Operations.Start(ctx, operation.Ask{Name: name, Arguments: arguments, By: asked(ctx), DryRun: dryRun})
	if err != nil {
		return nil, operationError(err)
	}
	return operationMessage(o), nil
}

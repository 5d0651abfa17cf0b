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
	"google.golang.org/protobuf/proto"
)

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

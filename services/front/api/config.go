package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// maxDocument is the limit of a document in the API's definition, in bytes.
const maxDocument = 1 << 20

// configService is the node's configuration, as machine.Applier keeps it.
type configService struct{ opts Options }

func (s *configService) Get(ctx context.Context, req *connect.Request[apiv1.GetConfigRequest]) (*connect.Response[apiv1.GetConfigResponse], error) {
	situation := s.opts.Config.Situation()
	version := req.Msg.GetVersion()
	text, err := s.opts.Config.Text(version)
	if err != nil {
		return nil, err
	}
	res := &apiv1.GetConfigResponse{Digest: configuration.Digest(text), Version: cmp.Or(version, situation.Version), Staged: situation.Staged, TryUntil: timestamp(situation.Try)}
	if res.Redacted = req.Msg.GetRedact() || !callOf(ctx).admin(); res.Redacted {
		if text, err = config.Redact(text); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	res.Document = text
	return connect.NewResponse(res), nil
}

func (s *configService) Apply(ctx context.Context, req *connect.Request[apiv1.ApplyConfigRequest]) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	caller := callOf(ctx)
	if err := checkDocument(caller.caller, req.Msg); err != nil {
		return nil, err
	}
	r, err := applyRequest(req.Msg.GetMode(), req.Msg.GetTryTimeout(), req.Msg.GetDryRun(), caller.String())
	if err != nil {
		return nil, err
	}
	r.Text, r.Base = req.Msg.GetDocument(), req.Msg.GetBase()
	if patch := req.Msg.GetPatch(); len(patch) > 0 {
		if r.Text, r.Base, err = s.patched(patch, r.Base); err != nil {
			return nil, err
		}
	}
	// The guard has looked before the document came: of two strangers at once, the
	// second must find that the node has a configuration.
	r.First, r.Unsigned, r.Force = caller.maintenance, req.Msg.GetUnsigned(), req.Msg.GetForce()
	interrupt := s.opts.Interrupt
	if !caller.admin() && !caller.maintenance { // another node
		interrupt = s.opts.InterruptLocked
	}
	return s.change(ctx, r, r.Force, interrupt, s.opts.Config.Apply)
}

// checkDocument checks what needs no parsing of the document or patch.
func checkDocument(c caller, m *apiv1.ApplyConfigRequest) error {
	size := len(m.GetDocument()) + len(m.GetPatch())
	switch {
	case size == 0:
		return failed(connect.CodeInvalidArgument, "the document is empty")
	case size > maxDocument:
		return failed(connect.CodeInvalidArgument, "the document has %d bytes; a configuration has at most %d", size, maxDocument)
	case len(m.GetDocument()) > 0 && len(m.GetPatch()) > 0:
		return failed(connect.CodeInvalidArgument, "the request has a document and a patch: send one of them")
	case !c.maintenance && !c.admin() && (len(m.GetPatch()) == 0 || m.GetBase() == "" || m.GetMode() != apiv1.ApplyMode_APPLY_MODE_IMMEDIATE):
		return failed(connect.CodePermissionDenied, "another node may only apply a patch with its base, in mode immediate; everything else needs role %s", contract.Admin)
	}
	return nil
}

// patched is the node's document with a patch merged into it, and the digest of what it was
// made from: base, or that of the present document.
func (s *configService) patched(patch []byte, base string) (text []byte, from string, err error) {
	now, err := s.opts.Config.Text(0)
	if err != nil {
		return nil, "", err
	}
	if from = base; from == "" {
		from = configuration.Digest(now)
	}
	if text, err = merge.Apply(now, patch); err != nil {
		return nil, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return text, from, nil
}

// change applies a request. If the node reboots or restarts etcd for it, the
// cluster must be able to work without the node.
func (s *configService) change(ctx context.Context, r configuration.Request, force bool, interrupt func(context.Context, string, bool, func() error) (string, error), apply func(context.Context, configuration.Request) (configuration.Result, error)) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	former, _ := network.Hostnames.Get(s.opts.Store, network.HostnameID) // none in maintenance
	if !r.First {
		r.Around = func(plan configuration.Result, do func() (configuration.Result, error)) (result configuration.Result, failure error) {
			would := "etcd would restart"
			switch {
			case plan.Rebooting:
				would, interrupt = "the node would reboot", s.opts.Reboot
			case !slices.Contains(plan.Restarted, etcd.ID):
				return do()
			}
			_, err := interrupt(ctx, "apply-config", force, func() error {
				result, failure = do()
				return failure
			})
			if failure == nil && err != nil { // the cluster's
				failure = failed(connect.CodeFailedPrecondition, would+" for this: %w. With --on-reboot it takes effect with the next reboot", err)
			}
			return result, failure
		}
	}
	result, err := apply(ctx, r)
	if err != nil {
		return nil, err
	}
	return applied(result, former.Spec), nil
}

func (s *configService) Rollback(ctx context.Context, req *connect.Request[apiv1.RollbackConfigRequest]) (*connect.Response[apiv1.ApplyConfigResponse], error) {
	r, err := applyRequest(req.Msg.GetMode(), req.Msg.GetTryTimeout(), req.Msg.GetDryRun(), callOf(ctx).String())
	if err != nil {
		return nil, err
	}
	return s.change(ctx, r, false, s.opts.Interrupt, func(ctx context.Context, r configuration.Request) (configuration.Result, error) {
		return s.opts.Config.Rollback(ctx, req.Msg.GetVersion(), r)
	})
}

func (s *configService) Confirm(ctx context.Context, _ *connect.Request[apiv1.ConfirmConfigRequest]) (*connect.Response[apiv1.ConfirmConfigResponse], error) {
	err := s.opts.Config.Confirm(ctx, callOf(ctx).String())
	return connect.NewResponse(&apiv1.ConfirmConfigResponse{}), err
}

func (s *configService) History(_ context.Context, _ *connect.Request[apiv1.ConfigHistoryRequest]) (*connect.Response[apiv1.ConfigHistoryResponse], error) {
	history, err := s.opts.Config.History()
	res := &apiv1.ConfigHistoryResponse{}
	for _, e := range history {
		res.Versions = append(res.Versions, &apiv1.ConfigVersion{
			Version: e.Version, Time: timestamp(e.Time), By: readable(e.By), Mode: modeNumber(e.Mode),
			Digest: e.Digest, Summary: readable(e.Summary), Current: e.Current,
		})
	}
	return connect.NewResponse(res), err
}

func modeNumber(mode configuration.Mode) apiv1.ApplyMode {
	return enum[apiv1.ApplyMode](apiv1.ApplyMode_value, "APPLY_MODE_", mode)
}

// applyRequest is what Apply and Rollback have in common.
func applyRequest(mode apiv1.ApplyMode, try *durationpb.Duration, dry bool, by string) (configuration.Request, error) {
	r := configuration.Request{DryRun: dry, By: by, Mode: configuration.Mode(modeName(mode))}
	if modeNumber(r.Mode) != mode || r.Mode == configuration.Undone {
		return r, failed(connect.CodeInvalidArgument, "mode %d isn't one; there are auto, immediate, on-reboot, reboot and try", mode)
	}
	if try == nil {
		return r, nil
	}
	if err := try.CheckValid(); err != nil {
		return r, failed(connect.CodeInvalidArgument, "the time to try: %w", err)
	}
	r.TryTimeout = try.AsDuration()
	switch {
	case r.Mode != configuration.Try:
		return r, failed(connect.CodeInvalidArgument, "a time to try is for mode try, not for mode %s", r.Mode)
	case r.TryTimeout < configuration.MinTryTimeout || r.TryTimeout > configuration.MaxTryTimeout:
		return r, failed(connect.CodeInvalidArgument, "a try of %s: from %s to %s is possible", r.TryTimeout, configuration.MinTryTimeout, configuration.MaxTryTimeout)
	}
	return r, nil
}

// applied is the answer of a node with this name.
func applied(r configuration.Result, name string) *connect.Response[apiv1.ApplyConfigResponse] {
	res := &apiv1.ApplyConfigResponse{
		Mode: modeNumber(r.Mode), Reboot: r.Rebooting, Restarts: r.Restarted, Version: r.Version, TryUntil: timestamp(r.Deadline),
	}
	for _, c := range r.Changes {
		res.Changes = append(res.Changes, &apiv1.ConfigChange{
			Path: readable(c.Path), Kind: string(c.Op), Old: readable(c.Old), New: readable(c.New), Effect: string(c.Effect), Note: readable(c.Note),
		})
		if c.Path == "machine.network.hostname" && name != "" && c.New != "" && c.New != name {
			res.Warnings = append(res.Warnings, fmt.Sprintf("the Node %s stays in Kubernetes, with the address of this machine: delete it with kubectl delete node %s; before that, a worker gets no certificate for kubectl logs and exec under its new name", name, name))
		}
	}
	if slices.ContainsFunc(r.Changes, func(c config.Change) bool { return c.Path == "cluster.controlPlane.endpoint" && c.Op == config.Changed }) {
		// What it means for those who have the former one.
		res.Warnings = append(res.Warnings,
			"pods and kubelets: only the API server of a control plane restarts. Tokens of pods name the former endpoint, and stay valid; kubelets have the load balancer of their node",
			"kubeconfigs: those with the former endpoint work for as long as it leads to an API server, whose certificate keeps its name: the last eight endpoints count. gbctl kubeconfig makes new ones",
			"other nodes: keep the former endpoint, and work with it. gbctl set-endpoint changes all nodes, one after another")
	}
	for _, w := range r.Warnings {
		res.Warnings = append(res.Warnings, readable(w.String()))
	}
	return connect.NewResponse(res)
}

// applyError has the code on which a client decides. The texts have the next step
// already.
func applyError(err error) error {
	code := connect.CodeFailedPrecondition
	switch {
	case errors.As(err, new(config.Problems)):
		code = connect.CodeInvalidArgument
	case errors.Is(err, configuration.ErrNoVersion), errors.Is(err, configuration.ErrNotKept):
		code = connect.CodeNotFound
	case errors.Is(err, configuration.ErrNoConfig):
		return failed(code, "%w: give it one with gbctl apply-config", err)
	case errors.Is(err, configuration.ErrConfigured):
		return failed(code, "%w: come with a client certificate of its cluster, without --insecure", err)
	case errors.Is(err, configuration.ErrStale):
		code = connect.CodeAborted
	case errors.Is(err, configuration.ErrBusy):
		code = connect.CodeUnavailable
	case errors.As(err, new(*fs.PathError)), errors.As(err, new(syscall.Errno)):
		code = connect.CodeInternal
	}
	return connect.NewError(code, err)
}

// timestamp of a time that may not be.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// readable is text that protobuf takes: a string field that isn't UTF-8 would
// cost the whole message.
func readable(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

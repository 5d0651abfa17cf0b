package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/system/machine"
)

// AuditID is the log of every call that changes something, or was to.
const AuditID = "audit"

// maxOutcome bounds what an error adds to a line of the log.
const maxOutcome = 200

// audit logs the calls of methods with the option changes: user, method, address,
// result and duration. It is an interceptor; the guard logs calls that don't reach it,
// because they are refused or can't be read.
type audit struct{ log *slog.Logger }

func (a *audit) record(caller caller, procedure, what string, err error, took time.Duration) {
	outcome := "ok"
	if err != nil {
		outcome = connect.CodeOf(err).String()
		var e *connect.Error
		// Problems of a document quote it, and it holds secrets.
		if errors.As(err, &e) && e.Code() != connect.CodeInvalidArgument {
			outcome += ": " + shortened(e.Message())
		}
	}
	attrs := []slog.Attr{
		slog.String("peer", caller.String()), slog.String("roles", strings.Join(caller.roles, ",")), slog.String("remote", caller.remote),
		slog.String("outcome", outcome), slog.Duration("took", took),
	}
	if what != "" {
		attrs = append(attrs, slog.String("what", what))
	}
	a.log.LogAttrs(context.Background(), slog.LevelInfo, strings.TrimPrefix(procedure, "/garboard.v1."), attrs...)
}

// shortened is the first line of a text, or the beginning of it.
func shortened(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	if len(text) > maxOutcome {
		text = strings.ToValidUTF8(text[:maxOutcome], "") + "…"
	}
	return text
}

// WrapUnary implements connect.Interceptor.
func (a *audit) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if m, ok := contract.Lookup(req.Spec().Procedure); ok && !m.Changes {
			return next(ctx, req)
		}
		began := time.Now()
		res, err := next(ctx, req)
		call := callOf(ctx)
		call.audited = true
		a.record(call.caller, req.Spec().Procedure, summary(req.Any()), err, time.Since(began))
		return res, err
	}
}

// WrapStreamingClient implements connect.Interceptor; there is no client here.
func (a *audit) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (a *audit) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if m, ok := contract.Lookup(conn.Spec().Procedure); ok && !m.Changes {
			return next(ctx, conn)
		}
		began := time.Now()
		err := next(ctx, conn)
		call := callOf(ctx)
		call.audited = true
		a.record(call.caller, conn.Spec().Procedure, call.what, err, time.Since(began))
		return err
	}
}

// summary describes a request, without secrets.
func summary(message any) string {
	switch m := message.(type) {
	case *apiv1.ApplyConfigRequest:
		what, content := "document", m.GetDocument()
		if len(m.GetPatch()) > 0 {
			what, content = "patch", m.GetPatch()
		}
		text := fmt.Sprintf("%s of %d bytes, sha256 %s, mode %s", what, len(content), machine.Digest(content)[:16], modeName(m.GetMode()))
		if m.GetTryTimeout() != nil {
			text += " for " + m.GetTryTimeout().AsDuration().String()
		}
		return text + dryRun(m.GetDryRun())
	case *apiv1.RollbackConfigRequest:
		return fmt.Sprintf("version %d, mode %s", m.GetVersion(), modeName(m.GetMode())) + dryRun(m.GetDryRun())
	case *apiv1.ControlServiceRequest:
		return shortened(fmt.Sprintf("%s %q", actionName(m.GetAction()), m.GetId()))
	case *apiv1.AnswerOperationRequest:
		return shortened(fmt.Sprintf("%q, question %q", m.GetId(), m.GetQuestion()))
	case *apiv1.AbortOperationRequest:
		return shortened(fmt.Sprintf("%q", m.GetId()))
	}
	return ""
}

func dryRun(dry bool) string {
	if dry {
		return ", dry run"
	}
	return ""
}

// modeName is the mode in gbctl's words.
func modeName(m apiv1.ApplyMode) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(m.String(), "APPLY_MODE_")), "_", "-")
}

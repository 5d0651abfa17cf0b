package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/front/tlsserver"
	"github.com/garboard-os/garboard/services/system/configuration"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// AuditID is the log of every call that changes something or discloses what may be secret,
// and of those that were refused.
const AuditID = "audit"

// maxOutcome bounds what an error adds to a line of the log.
const maxOutcome = 200

// audit logs the calls of methods with the options changes and discloses: user, method,
// address, what was asked for, result and duration. The guard logs calls that don't reach a
// service, because they are refused or can't be read.
type audit struct {
	log   *slog.Logger
	lines tlsserver.Lines
}

// entry is a call in the log.
type entry struct {
	caller
	procedure, what string
	err             error
	took            time.Duration
	refused         bool // the call wasn't let in
}

// record writes a line. A flood of calls that were refused, or of readers, who get nothing
// secret, loses lines, and they are counted: there is room for those of others. Each line
// of others is written.
func (a *audit) record(e entry) {
	dropped, ok := 0, true
	if more := func(role string) bool { return role != string(contract.Reader) }; e.refused || !slices.ContainsFunc(e.roles, more) {
		dropped, ok = a.lines.Take(e.writer(), time.Now())
	}
	if !ok {
		return
	}
	outcome := "ok"
	if e.err != nil {
		outcome = connect.CodeOf(e.err).String()
		var err *connect.Error
		// Problems of a document quote it, and it holds secrets.
		if errors.As(e.err, &err) && err.Code() != connect.CodeInvalidArgument {
			outcome += ": " + shortened(err.Message())
		}
	}
	attrs := []slog.Attr{
		slog.String("peer", e.caller.String()), slog.String("roles", strings.Join(e.roles, ",")), slog.String("remote", e.remote),
		slog.String("outcome", outcome), slog.Duration("took", e.took),
	}
	if e.what != "" {
		attrs = append(attrs, slog.String("what", e.what))
	}
	if dropped > 0 {
		attrs = append(attrs, slog.Int("dropped", dropped))
	}
	a.log.LogAttrs(context.Background(), slog.LevelInfo, strings.TrimPrefix(e.procedure, "/garboard.v1."), attrs...)
}

// writer is who causes a line. A reader doesn't use the lines of an administrator of the
// same name.
func (e entry) writer() string {
	host, _, _ := net.SplitHostPort(e.remote)
	return cmp.Or(e.peer, host) + "\x00" + strings.Join(e.roles, ",")
}

// shortened is the first line of a text, or the beginning of it.
func shortened(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return config.Shorten(text, maxOutcome)
}

// calls is the interceptor of a service, with the code for its errors that have none.
type calls struct {
	connect.UnaryInterceptorFunc // as a client it changes nothing
	*Server
	code func(error) error
}

// WrapUnary implements connect.Interceptor.
func (c calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		err = c.audited(ctx, req.Spec().Procedure, func() any { return req.Any() }, func() error {
			res, err = next(ctx, req)
			return err
		})
		return res, err
	}
}

// audited runs a call, and records it.
func (c calls) audited(ctx context.Context, procedure string, message func() any, run func() error) error {
	began := time.Now()
	err := c.coded(run(), c.code)
	if m, ok := contract.Lookup(procedure); ok && !m.Audited() {
		return err
	}
	call := callOf(ctx)
	call.audited = true
	c.audit.record(entry{caller: call.caller, procedure: procedure, what: summary(message()), err: err, took: time.Since(began)})
	return err
}

// WrapStreamingHandler implements connect.Interceptor.
func (c calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		first := &firstMessage{StreamingHandlerConn: conn}
		return c.audited(ctx, conn.Spec().Procedure, func() any { return first.message }, func() error { return next(ctx, first) })
	}
}

// firstMessage remembers what a stream was asked for.
type firstMessage struct {
	connect.StreamingHandlerConn
	message any
}

// Receive implements connect.StreamingHandlerConn.
func (f *firstMessage) Receive(message any) error {
	err := f.StreamingHandlerConn.Receive(message)
	if f.message == nil && err == nil {
		f.message = message
	}
	return err
}

// summary describes a request, without secrets.
func summary(message any) string {
	switch m := message.(type) {
	case *apiv1.ApplyConfigRequest:
		what, content := "document", m.GetDocument()
		if len(m.GetPatch()) > 0 {
			what, content = "patch", m.GetPatch()
		}
		text := fmt.Sprintf("%s of %d bytes, sha256 %s, mode %s", what, len(content), configuration.Digest(content)[:16], modeName(m.GetMode()))
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
	case proto.Message:
		return shortened(fields(m.ProtoReflect()))
	}
	return ""
}

// fields are the names, numbers, times and switches of a request. Bytes are content, which may be
// secret.
func fields(m protoreflect.Message) string {
	var parts []string
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		switch add := func(v protoreflect.Value) { parts = append(parts, fmt.Sprintf("%s %q", f.Name(), v.String())) }; {
		case !m.Has(f) || f.Kind() == protoreflect.BytesKind:
		case f.Message() != nil:
			if one, ok := m.Get(f).Interface().(protoreflect.Message); ok {
				switch t := one.Interface().(type) {
				case *durationpb.Duration:
					parts = append(parts, fmt.Sprintf("%s %s", f.Name(), t.AsDuration()))
				case *timestamppb.Timestamp:
					parts = append(parts, fmt.Sprintf("%s %s", f.Name(), t.AsTime().Format(time.RFC3339)))
				}
			}
		case f.IsList():
			for j := range m.Get(f).List().Len() {
				add(m.Get(f).List().Get(j))
			}
		default:
			add(m.Get(f))
		}
	}
	return strings.Join(parts, ", ")
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

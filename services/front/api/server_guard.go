package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// guard stands before everything: nothing of a request's body is read before
// its caller is known and may call, and there is room.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == contract.Refusals {
			s.refusal(w, r)
			return
		}
		method, known := contract.Lookup(r.URL.Path)
		caller, err := identify(r.Header)
		if err == nil {
			err = s.permit(caller, method, known)
		}
		var leave func()
		if err == nil {
			leave, err = s.enter(caller, method)
		}
		if err != nil {
			s.audit.record(entry{caller: caller, procedure: cmp.Or(method.Procedure, shortened(readable(r.URL.Path))), err: err, refused: true})
			s.refuse(w, r, err)
			return
		}
		defer leave()
		call := &call{caller: caller}
		ctx, cancel := s.bound(context.WithValue(r.Context(), callKey{}, call), method)
		defer cancel()
		defer func() { // Connect answers for its own
			if p := recover(); p != nil {
				_ = s.panicked(r.URL.Path, p)
				panic(http.ErrAbortHandler) // the caller must not take this for the end
			}
		}()
		next.ServeHTTP(w, r.WithContext(ctx))
		if method.Audited() && !call.audited {
			s.audit.record(entry{caller: caller, procedure: method.Procedure, err: failed(connect.CodeInvalidArgument, "the request couldn't be read")})
		}
	})
}

// refusal records a call that the gate has refused.
func (s *Server) refusal(w http.ResponseWriter, r *http.Request) {
	var told contract.Refusal
	if err := json.NewDecoder(io.LimitReader(r.Body, maxHeader)).Decode(&told); err != nil {
		s.refuse(w, r, failed(connect.CodeInvalidArgument, "a refusal: %w", err))
		return
	}
	s.audit.record(entry{
		caller:    caller{peer: shortened(told.Peer), roles: told.Roles, remote: shortened(told.Remote)},
		procedure: shortened(told.Procedure), err: failed(told.Code, "%s", told.Why), refused: true,
	})
}

// enter takes the room for a call. If there is none, the caller gets an error at once:
// waiting would only hide the load. The gate lets others than administrators use less, but
// an administrator's room doesn't depend on that.
func (s *Server) enter(c caller, m contract.Method) (leave func(), err error) {
	room, what := s.calls, "calls"
	if m.Streaming {
		room, what = s.streams, "streams"
	}
	if others := cap(room) * 3 / 4; !c.admin() && len(room) >= others {
		return nil, failed(connect.CodeResourceExhausted, "the node serves %d %s already: the room for the others is for administrators", others, what)
	}
	select {
	case room <- struct{}{}:
		return func() { <-room }, nil
	default:
		return nil, failed(connect.CodeResourceExhausted, "the node serves %d %s already: try again in a moment, or end some of them", cap(room), what)
	}
}

// bound ends a call after its time, and a stream when the node stops.
func (s *Server) bound(ctx context.Context, m contract.Method) (context.Context, context.CancelFunc) {
	if !m.Streaming {
		return context.WithTimeout(ctx, callTimeout)
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.stopping, cancel)
	return ctx, func() { stop(); cancel() }
}

// coded gives errors that have none the code on which a client decides: each service
// has its own. Streams end with the reason why the node ends.
func (s *Server) coded(err error, code func(error) error) error {
	_, has := err.(*connect.Error)
	switch {
	case s.stopping.Err() != nil && errors.Is(err, context.Canceled):
		return failed(connect.CodeUnavailable, "the node's API stops")
	case has || err == nil:
		return err
	}
	return code(err)
}

// internal is for services whose other errors are of the node itself.
func internal(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return connect.NewError(connect.CodeInternal, err)
}

// panicked notes a panic, and is what its caller gets.
func (s *Server) panicked(procedure string, p any) error {
	if p == http.ErrAbortHandler {
		panic(p) // it isn't one: net/http's way to end a connection
	}
	s.log.Error(fmt.Sprintf("panic in %s: %v", procedure, p), "stack", string(debug.Stack()))
	return failed(connect.CodeInternal, "a defect of the node: it is in the log %q (gbctl logs %s)", LogID, LogID)
}

// refuse answers with an error in the caller's protocol. Plain HTTP gets a status and a
// JSON object, as by Connect.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	_ = s.errors.Write(w, r, s.coded(err, internal)) // whoever is gone isn't told
}

// failed is an error for the caller.
func failed(code connect.Code, format string, args ...any) error {
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// maxName bounds the headers about the caller: names in certificates are at most 64
// characters (RFC 5280, ub-common-name), and there are five roles.
const maxName = 512

// caller is the client, as the gate reports it.
type caller struct {
	peer        string // "" in maintenance mode: unknown
	roles       []string
	remote      string
	maintenance bool
}

// call is one call under way.
type call struct {
	caller
	audited bool
}

type callKey struct{}

// callOf is the call that ctx belongs to. Without one it is an empty call, which has no
// roles.
func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return new(call)
}

// admin reports whether secrets may be shown.
func (c caller) admin() bool {
	return !c.maintenance && slices.Contains(c.roles, string(contract.Admin))
}

// String is for the history of the configuration and for the log.
func (c caller) String() string {
	if c.maintenance {
		return "maintenance mode, from " + c.remote
	}
	return c.peer
}

// printable reports whether a text can be no more than a part of a line in the audit log.
func printable(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}

// identify reads the gate's headers. A request without them didn't come through the gate.
func identify(h http.Header) (caller, error) {
	for _, name := range []string{contract.HeaderPeer, contract.HeaderRemote, contract.HeaderRoles} {
		if value := h.Get(name); len(h.Values(name)) > 1 || len(value) > maxName || !printable(value) {
			return caller{}, failed(connect.CodeUnauthenticated, "header %s is there twice, too long or no text: only the gate (apid) may call here", name)
		}
	}
	c := caller{peer: h.Get(contract.HeaderPeer), remote: h.Get(contract.HeaderRemote)}
	for role := range strings.SplitSeq(h.Get(contract.HeaderRoles), ",") {
		if role = strings.TrimSpace(role); role != "" {
			c.roles = append(c.roles, role)
		}
	}
	mode := h.Values(contract.HeaderMode)
	switch {
	case c.remote == "" || len(mode) != 1:
	case mode[0] == contract.ModeMaintenance || mode[0] == contract.ModeLocked:
		c.maintenance, c.peer, c.roles = true, "", nil
		return c, nil
	case mode[0] == contract.ModeNormal && c.peer != "":
		return c, nil
	}
	return caller{}, failed(connect.CodeUnauthenticated, "the caller is unknown: the machine API is reached through the gate (apid) on port %d only", contract.Port)
}

// permit is the same decision that the gate has made, made again where it
// counts.
func (s *Server) permit(caller caller, m contract.Method, known bool) error {
	switch {
	case !known:
		return failed(connect.CodeUnimplemented, "this node has no such method: gbctl and the node may be of different versions (gbctl version)")
	case caller.maintenance:
		return anonymous(s.opts, m)
	case !contract.Allowed(m, caller.roles):
		return failed(connect.CodePermissionDenied, "%s needs role %s; the certificate of %q has %s", m.Procedure, m.Role, caller.peer, listed(caller.roles))
	}
	return nil
}

// anonymous is an error unless a node without a configuration answers a method, or a locked one.
func anonymous(o Options, m contract.Method) error {
	stage, err := configuration.Stages.Get(o.Store, configuration.StageID)
	switch {
	case err != nil || stage.Spec == configuration.Searching:
		return failed(connect.CodeUnavailable, "the node is still looking for its configuration: try again in a moment")
	case !stage.Spec.Anonymous():
		return failed(connect.CodeFailedPrecondition, "the node has a configuration: come with a client certificate of its cluster, without --insecure")
	case stage.Spec == configuration.Locked && !m.Locked:
		return failed(connect.CodeFailedPrecondition, "no key of this machine opens its disk, so %s isn't possible: unlock it first (gbctl -n ADDRESS unlock --insecure)", m.Procedure)
	case stage.Spec == configuration.Maintenance && !m.Maintenance:
		return failed(connect.CodeFailedPrecondition, "the node is in maintenance mode, in which %s isn't possible: give it a configuration first (gbctl apply-config --insecure)", m.Procedure)
	}
	return nil
}

func listed(roles []string) string {
	if len(roles) == 0 {
		return "none"
	}
	return strings.Join(roles, ", ")
}

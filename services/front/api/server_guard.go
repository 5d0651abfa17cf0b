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

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
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

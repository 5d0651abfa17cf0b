package api

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/system/configuration"
)

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

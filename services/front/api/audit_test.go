package api

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/machine"
)

// audited is the last line of the audit log.
func (r *rig) audited() string {
	r.t.Helper()
	lines := r.opts.Logs.Tail(AuditID, 1)
	if len(lines) == 0 {
		r.t.Fatal("nothing was audited")
	}
	return lines[0]
}

func wantParts(t *testing.T, line string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(line, part) {
			t.Errorf("%q doesn't say %q", line, part)
		}
	}
}

func TestChangesAreAudited(t *testing.T) {
	r := newRig(t)
	r.applier.texts = map[uint64][]byte{0: []byte("version: v1alpha1")}
	r.serve()
	changes := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	document := "version: v1alpha1\nmachine:\n  token: hush\n"
	_, err := ask(t, changes.Apply, &apiv1.ApplyConfigRequest{Document: []byte(document), DryRun: true, Mode: apiv1.ApplyMode_APPLY_MODE_ON_REBOOT})
	must(t, err)
	wantParts(t, r.audited(), "ConfigService/Apply peer=jane roles=os:admin remote=10.5.0.1:40000 outcome=ok took=",
		fmt.Sprintf("document of %d bytes, sha256 ", len(document)), "mode on-reboot, dry run")

	// An error that quotes the document isn't repeated, another one is.
	r.applier.err = config.Problems{{What: `"hush" isn't a token`}}
	_, err = ask(t, changes.Apply, &apiv1.ApplyConfigRequest{Document: []byte(document)})
	wantCode(t, err, connect.CodeInvalidArgument, "hush")
	wantParts(t, r.audited(), "outcome=invalid_argument took")
	r.applier.err = machine.ErrStale
	_, err = ask(t, changes.Apply, &apiv1.ApplyConfigRequest{Document: []byte(document)})
	wantCode(t, err, connect.CodeAborted)
	wantParts(t, r.audited(), `outcome="aborted: the node's configuration has changed`)
	r.applier.err = nil

	_, err = ask(t, garboardv1connect.NewServiceServiceClient(r.as(operator), host).Control, &apiv1.ControlServiceRequest{Id: "kubelet", Action: apiv1.ControlServiceRequest_ACTION_RESTART})
	must(t, err)
	wantParts(t, r.audited(), "ServiceService/Control peer=jane roles=os:operator", `what="restart \"kubelet\""`)

	// Who may not, who can't be known, and who can't be understood.
	_, err = ask(t, garboardv1connect.NewConfigServiceClient(r.as(reader), host).Confirm, &apiv1.ConfirmConfigRequest{})
	wantCode(t, err, connect.CodePermissionDenied)
	wantParts(t, r.audited(), "ConfigService/Confirm peer=jane roles=os:reader", `outcome="permission_denied: `)
	r.post(nil, "/garboard.v1.ConfigService/Rollback", "application/json", strings.NewReader("{}"))
	wantParts(t, r.audited(), `ConfigService/Rollback peer="" roles="" remote="" outcome="unauthenticated: `)
	r.post(admin, "/garboard.v1.ConfigService/Rollback", "application/json", strings.NewReader(`{"version":"none"`))
	wantParts(t, r.audited(), "ConfigService/Rollback peer=jane roles=os:admin", "outcome=invalid_argument")

	before := len(r.opts.Logs.Tail(AuditID, 0))
	_, err = ask(t, changes.Get, &apiv1.GetConfigRequest{})
	must(t, err)
	if after := r.opts.Logs.Tail(AuditID, 0); len(after) != before {
		t.Errorf("reading was audited: %q", after[before:])
	}
	if log := strings.Join(r.opts.Logs.Tail(AuditID, 0), "\n"); strings.Contains(log, "hush") {
		t.Errorf("a secret in the log:\n%s", log)
	}
}

// TestEveryChangeIsAudited goes through the contract, with a body that nobody
// understands.
func TestEveryChangeIsAudited(t *testing.T) {
	r := newRig(t).serve()
	for _, m := range contract.Methods() {
		before := len(r.opts.Logs.Tail(AuditID, 0))
		r.post(admin, m.Procedure, "application/json", strings.NewReader("{"))
		if more := len(r.opts.Logs.Tail(AuditID, 0)) - before; (more == 1) != m.Changes {
			t.Errorf("%s: %d lines", m.Procedure, more)
		}
	}
}

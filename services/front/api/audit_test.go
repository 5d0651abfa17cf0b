package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"google.golang.org/protobuf/types/known/timestamppb"
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
	r.applier.err = configuration.ErrStale
	_, err = ask(t, changes.Apply, &apiv1.ApplyConfigRequest{Document: []byte(document)})
	wantCode(t, err, connect.CodeAborted)
	wantParts(t, r.audited(), `outcome="aborted: the node's configuration has changed`)
	r.applier.err = nil

	_, err = ask(t, garboardv1connect.NewServiceServiceClient(r.as(operator), host).Control, &apiv1.ControlServiceRequest{Id: "kubelet", Action: apiv1.ControlServiceRequest_ACTION_RESTART})
	must(t, err)
	wantParts(t, r.audited(), "ServiceService/Control peer=jane roles=os:operator", `what="restart \"kubelet\""`)

	set := garboardv1connect.NewNodeServiceClient(r.as(admin), host).SetTime
	_, err = ask(t, set, &apiv1.SetTimeRequest{Time: timestamppb.New(time.Unix(1_800_000_000, 0))})
	must(t, err)
	wantParts(t, r.audited(), "NodeService/SetTime peer=jane roles=os:admin", "outcome=ok", `what="time 2027-01-15T08:00:00Z"`)
	_, err = ask(t, set, &apiv1.SetTimeRequest{Time: timestamppb.New(time.Unix(0, 0))})
	wantCode(t, err, connect.CodeFailedPrecondition, "was built later")
	wantParts(t, r.audited(), `outcome="failed_precondition: this system was built later`)
	for _, wrong := range []*timestamppb.Timestamp{nil, {Seconds: 1 << 60}} {
		_, err = ask(t, set, &apiv1.SetTimeRequest{Time: wrong})
		wantCode(t, err, connect.CodeInvalidArgument)
	}
	_, err = ask(t, garboardv1connect.NewNodeServiceClient(r.as(operator), host).SetTime, &apiv1.SetTimeRequest{Time: timestamppb.Now()})
	wantCode(t, err, connect.CodePermissionDenied)

	// Who may not, who can't be known, and who can't be understood.
	_, err = ask(t, garboardv1connect.NewConfigServiceClient(r.as(reader), host).Confirm, &apiv1.ConfirmConfigRequest{})
	wantCode(t, err, connect.CodePermissionDenied)
	wantParts(t, r.audited(), "ConfigService/Confirm peer=jane roles=os:reader", `outcome="permission_denied: `)
	r.post(nil, "/garboard.v1.ConfigService/Rollback", "application/json", strings.NewReader("{}"))
	wantParts(t, r.audited(), `ConfigService/Rollback peer="" roles="" remote="" outcome="unauthenticated: `)
	r.post(admin, "/garboard.v1.ConfigService/Rollback", "application/json", strings.NewReader(`{"version":"none"`))
	wantParts(t, r.audited(), "ConfigService/Rollback peer=jane roles=os:admin", "outcome=invalid_argument")

	before := len(r.opts.Logs.Tail(AuditID, 0))
	_, err = ask(t, changes.History, &apiv1.ConfigHistoryRequest{})
	must(t, err)
	if after := r.opts.Logs.Tail(AuditID, 0); len(after) != before {
		t.Errorf("reading was audited: %q", after[before:])
	}
	if log := strings.Join(r.opts.Logs.Tail(AuditID, 0), "\n"); strings.Contains(log, "hush") {
		t.Errorf("a secret in the log:\n%s", log)
	}
}

// What may be secret leaves a line with who got what, also by a call whose client has gone
// before its end. Nobody can use up the log: neither by calls that are refused, nor a reader,
// who gets no secrets.
func TestDisclosuresAreAudited(t *testing.T) {
	r := newRig(t)
	r.applier.texts = map[uint64][]byte{0: []byte("version: v1alpha1")}
	r.serve()
	key := filepath.Join(t.TempDir(), "ca.key")
	must(t, os.WriteFile(key, bytes.Repeat([]byte("hush"), 1<<20), 0o600))
	files := garboardv1connect.NewFileServiceClient(r.as(admin), host)
	for range 2 * 20 { // more than a flood may write
		read, err := files.Read(t.Context(), connect.NewRequest(&apiv1.ReadFileRequest{Path: key}))
		must(t, err)
		if !read.Receive() {
			t.Fatal(read.Err())
		}
		read.Close()
	}
	eventually.That(t, 10*time.Second, "each read to have a line", func() error {
		if lines := r.opts.Logs.Tail(AuditID, 0); len(lines) != 2*20 {
			return fmt.Errorf("%d lines", len(lines))
		}
		return nil
	})
	wantParts(t, r.audited(), "FileService/Read peer=jane roles=os:admin remote=10.5.0.1:40000 outcome=", "what=", key)
	copied, err := files.Copy(t.Context(), connect.NewRequest(&apiv1.CopyFilesRequest{Path: filepath.Dir(key)}))
	must(t, err)
	for copied.Receive() {
		continue
	}
	must(t, copied.Err())
	wantParts(t, r.audited(), "FileService/Copy", "outcome=ok", filepath.Dir(key))
	_, err = ask(t, garboardv1connect.NewConfigServiceClient(r.as(admin), host).Get, &apiv1.GetConfigRequest{Redact: true})
	must(t, err)
	wantParts(t, r.audited(), "ConfigService/Get peer=jane roles=os:admin", "outcome=ok", `redact \"true\"`)
	snapshot, err := garboardv1connect.NewEtcdServiceClient(r.as(identity(contract.EtcdBackup)), host).Snapshot(t.Context(), connect.NewRequest(&apiv1.EtcdSnapshotRequest{}))
	must(t, err)
	for snapshot.Receive() {
		continue
	}
	wantParts(t, r.audited(), "EtcdService/Snapshot peer=jane roles=os:etcd:backup", "outcome=")

	before := len(r.opts.Logs.Tail(AuditID, 0))
	for range 100 {
		_, err = ask(t, garboardv1connect.NewConfigServiceClient(r.as(reader), host).Get, &apiv1.GetConfigRequest{})
		must(t, err)
		r.post(reader, "/garboard.v1.FileService/Read", "application/connect+json", strings.NewReader(""))
	}
	if more := len(r.opts.Logs.Tail(AuditID, 0)) - before; more < 20 || more > 60 {
		t.Errorf("a reader's flood of 200 calls has %d lines", more)
	}
	r.post(admin, "/garboard.v1.FileService/Delete", "application/json", strings.NewReader("{}"))
	wantParts(t, r.audited(), "FileService/Delete peer=jane roles=os:admin", `outcome="unimplemented: `)
}

// The gate tells of what it has refused. What it says is one line, whatever it is.
func TestRefusalsOfTheGateAreAudited(t *testing.T) {
	r := newRig(t).serve()
	tell := func(told contract.Refusal) int {
		body, err := json.Marshal(told)
		must(t, err)
		return r.post(nil, contract.Refusals, "application/json", bytes.NewReader(body)).StatusCode
	}
	if status := tell(contract.Refusal{Peer: "bob", Roles: []string{"os:reader"}, Remote: "10.5.0.9:41000", Procedure: "/garboard.v1.FileService/Read",
		Code: connect.CodePermissionDenied, Why: "needs the role os:admin"}); status != http.StatusOK {
		t.Errorf("status %d", status)
	}
	wantParts(t, r.audited(), `FileService/Read peer=bob roles=os:reader remote=10.5.0.9:41000 outcome="permission_denied: needs the role os:admin"`)
	tell(contract.Refusal{Peer: "x\ny", Remote: strings.Repeat("z", 1<<10), Procedure: "a\nb", Code: connect.CodeUnauthenticated, Why: "q\nr"})
	if line := r.audited(); strings.Contains(line, "\n") || len(line) > 1<<10 {
		t.Errorf("%d bytes: %q", len(line), line)
	}
	if status := r.post(nil, contract.Refusals, "application/json", strings.NewReader("{")).StatusCode; status != http.StatusBadRequest {
		t.Errorf("half a refusal: status %d", status)
	}
}

// TestEveryChangeIsAudited goes through the contract, with a body that nobody
// understands. What even an administrator may not call is audited as refused.
func TestEveryChangeIsAudited(t *testing.T) {
	r := newRig(t).serve()
	for _, m := range contract.Methods() {
		before := len(r.opts.Logs.Tail(AuditID, 0))
		r.post(admin, m.Procedure, "application/json", strings.NewReader("{"))
		if more := len(r.opts.Logs.Tail(AuditID, 0)) - before; (more == 1) != (m.Audited() || !contract.Allowed(m, []string{string(contract.Admin)})) {
			t.Errorf("%s: %d lines", m.Procedure, more)
		}
	}
}

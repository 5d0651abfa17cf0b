package api

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/machine"
)

// S-213: a worker says why it does nothing of the kind.
func TestS213EtcdOnAWorker(t *testing.T) {
	r := newRig(t).serve()
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.Type = config.Worker
	must(t, machine.Configs.Put(r.opts.Store.As("test"), machine.ConfigID, cfg))
	c := garboardv1connect.NewEtcdServiceClient(r.as(admin), host)
	_, begin := ask(t, c.Bootstrap, &apiv1.BootstrapRequest{})
	_, members := ask(t, c.Members, &apiv1.EtcdMembersRequest{})
	_, leave := ask(t, c.Leave, &apiv1.EtcdLeaveRequest{})
	_, remove := ask(t, c.RemoveMember, &apiv1.EtcdRemoveMemberRequest{Id: "a1"})
	for _, err := range []error{begin, members, leave, remove} {
		if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "etcd runs on control planes only") {
			t.Errorf("error %v", err)
		}
	}
	upload := c.Recover(t.Context())
	must(t, upload.Send(&apiv1.RecoverRequest{Size: 28 << 10, Sha256: make([]byte, 32), Data: []byte("x"), SkipHashCheck: true}))
	if _, err := upload.CloseAndReceive(); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "etcd runs on control planes only") {
		t.Errorf("recover: %v", err)
	}
	upload = c.Recover(t.Context())
	must(t, upload.Send(&apiv1.RecoverRequest{Size: 28 << 10, Sha256: []byte("short")}))
	if _, err := upload.CloseAndReceive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("recover without a sum: %v", err)
	}
	if _, err := c.Recover(t.Context()).CloseAndReceive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("recover with nothing: %v", err)
	}
	peers := garboardv1connect.NewEtcdServiceClient(r.as(identity(contract.Peer)), host)
	if _, err := ask(t, peers.Beginning, &apiv1.BeginningRequest{}); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("beginning: %v", err)
	}
	stream, err := c.Snapshot(t.Context(), connect.NewRequest(&apiv1.EtcdSnapshotRequest{}))
	must(t, err)
	if stream.Receive() || connect.CodeOf(stream.Err()) != connect.CodeFailedPrecondition {
		t.Errorf("snapshot: %v", stream.Err())
	}
}

// The ID of the cluster is said, and etcd's own once it has one.
func TestBootstrapSaysTheClusterID(t *testing.T) {
	t.Parallel()
	for want, begun := range map[string]etcd.Begun{
		"begins; cluster ID 3f":                    {Token: "3f"},
		"has begun; cluster ID 3f":                 {Token: "3f", Already: true},
		"has begun; cluster ID 3f, in etcd 00cdf8": {Token: "3f", Cluster: "00cdf8", Already: true},
	} {
		got := bootstrapped(&begun, "begins", "has begun")
		if got.Message != want || got.Token != begun.Token || got.Already != begun.Already {
			t.Errorf("%+v: %v, want %q", begun, got, want)
		}
	}
}

// What a caller can do something about is told apart.
func TestEtcdErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err     error
		code    connect.Code
		message string
	}{
		{fmt.Errorf("remove: %w", etcd.ErrNoMember), connect.CodeNotFound, "remove: "},
		{fmt.Errorf("list: %w", context.DeadlineExceeded), connect.CodeUnavailable, "has no quorum"},
		{errors.New("etcdserver: unhealthy cluster"), connect.CodeUnavailable, "unhealthy cluster"},
	} {
		err := etcdError(tt.err)
		if connect.CodeOf(err) != tt.code || !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%v became %v", tt.err, err)
		}
	}
}

package api

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// S-213: a worker says why it does nothing of the kind.
func TestS213EtcdOnAWorker(t *testing.T) {
	r := newRig(t).serve()
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.Type = config.Worker
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, cfg))
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

// Whoever calls with the certificate of a control plane may reach etcd from then on; nobody else's call says so.
func TestControlPlanesAreMet(t *testing.T) {
	t.Parallel()
	store, dir := resource.NewStore(), t.TempDir()
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.Type = config.ControlPlane
	w := store.As("test")
	must(t, configuration.Configs.Put(w, configuration.ConfigID, cfg))
	must(t, network.Hostnames.Put(w, network.HostnameID, "one"))
	must(t, network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2")}))
	s := &etcdService{member: etcd.New(etcd.Options{Store: store, DataDir: dir + "/data", Journal: dir + "/etcd.json"})}
	for remote, role := range map[string]contract.Role{"10.9.0.3:40000": contract.Peer, "[fd00:9::3]:40000": contract.Peer, "10.9.0.4:40000": contract.Admin, "10.9.0.5:40000": contract.Reader} {
		ctx := context.WithValue(t.Context(), callKey{}, &call{caller: caller{peer: "x", roles: []string{string(role)}, remote: remote}})
		if _, err := s.Beginning(ctx, connect.NewRequest(&apiv1.BeginningRequest{})); err != nil {
			t.Fatal(err)
		}
	}
	var met []string
	for _, m := range etcd.Met.List(store) {
		met = append(met, m.ID)
	}
	slices.Sort(met)
	if want := []string{"10.9.0.3", "fd00:9::3"}; !slices.Equal(met, want) {
		t.Errorf("met %v, want %v", met, want)
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

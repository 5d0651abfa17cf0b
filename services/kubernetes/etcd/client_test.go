package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// status is a member that only answers requests for its status.
type status struct {
	pb.UnimplementedMaintenanceServer
}

func (*status) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	return &pb.StatusResponse{Header: &pb.ResponseHeader{}, Version: "3"}, nil
}

// A client of etcd that lives longer than an authority goes on with the next one, and a member
// accepts what its authorities have signed, and nothing else.
func TestClientWhileTheAuthorityIsReplaced(t *testing.T) {
	t.Parallel()
	authority := func() config.CertKey {
		ca, err := pki.NewEtcdCA(time.Now())
		must(t, err)
		return config.CertKey{Crt: ca.Cert, Key: ca.Key}
	}
	former, next := authority(), authority()
	listener, addr := freeport.Listen(t, clientPort)
	crt, key, err := next.CA().Issue(pki.Leaf{CN: "n1", IPs: []netip.Addr{addr}, Server: true, Now: time.Now()})
	must(t, err)
	pair, err := tls.X509KeyPair(crt, key)
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(next.Crt)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots})))
	pb.RegisterMaintenanceServer(server, &status{})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	store := resource.NewStore()
	use := func(ca config.CertKey) {
		crt, key, err := ca.CA().Issue(pki.Leaf{CN: "garboard", Client: true, Now: time.Now()})
		must(t, err)
		must(t, secrets.Etcd.Put(store.As("test"), secrets.EtcdID, secrets.EtcdSpec{CA: ca.Crt, Client: config.CertKey{Crt: crt, Key: key}}))
	}
	use(former)
	client, err := Dial(t.Context(), store, clientURL(addr))
	must(t, err)
	defer client.Close()
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := client.Status(ctx, clientURL(addr))
		return err
	}
	if ask() == nil {
		t.Error("the client accepts a member of an unknown authority")
	}
	use(next)
	eventually.That(t, 20*time.Second, "the client to use the next authority", ask)
	must(t, AcceptedBy(t.Context(), store, addr, next))
	if AcceptedBy(t.Context(), store, addr, former) == nil {
		t.Error("the member accepts the former authority")
	}
}

// The member that has the address of this node may be another one, which is only off: it isn't removed.
func TestNoRoomInPlaceOfAnother(t *testing.T) {
	t.Parallel()
	me := self{name: "new", addr: netip.MustParseAddr("10.5.0.4")}
	members := []*pb.Member{{ID: 1, Name: "one", PeerURLs: []string{"https://10.5.0.3:2380"}}, {ID: 2, Name: "off", PeerURLs: []string{me.peerURL()}}}
	_, _, err := new(Etcd).makeRoom(t.Context(), nil, members, me, func(m *pb.Member) bool { return m.Name == me.name })
	if w, ok := errors.AsType[*wait](err); !ok || !strings.Contains(w.what, "off (2)") || !strings.Contains(w.what, "gbctl etcd remove-member 2") {
		t.Errorf("%v", err)
	}
}

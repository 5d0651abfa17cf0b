package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// requestTimeout of one request. etcd gives up a change of members after 7 s:
	// five for its quorum, and two of its election timeouts.
	requestTimeout = 10 * time.Second
	// lookTimeout bounds a request for the control planes to an apiserver that may be on a
	// machine that is gone.
	lookTimeout = 10 * time.Second
	// knownTimeout limits it if this node knows other addresses to ask: a machine that is gone
	// must leave time for them, also if everything together is limited by examineTimeout.
	knownTimeout = 2 * time.Second
	// statusTimeout: a member that takes longer to answer a status request doesn't count.
	statusTimeout = 3 * time.Second
)

// errNoControlPlane: Kubernetes lists no other control plane.
var errNoControlPlane = errors.New("no other control plane is known to Kubernetes")

// Dial makes a client for the members at the URLs, with this node's certificate. All
// packages use this one. It connects with the first request; each request needs a
// deadline of its own, because the client tries again until its context ends. ctx is for
// the whole life of the client.
func Dial(ctx context.Context, r resource.Reader, urls ...string) (*clientv3.Client, error) {
	trust, err := trust(r)
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(clientv3.Config{
		Context:     ctx,
		Endpoints:   urls,
		DialTimeout: requestTimeout,
		// A connection from an address that the node has no more ends, as does one to a machine that is gone.
		DialKeepAliveTime:    requestTimeout,
		DialKeepAliveTimeout: statusTimeout,

		TLS:         trust,
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(reloading{credentials.NewTLS(trust), r})},
		Logger:      zap.NewNop(), // errors are returned
	})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(urls, ", "), err)
	}
	return client, nil
}

// reloading reads the authorities and this node's certificate at each handshake: a client may
// live longer than both.
type reloading struct {
	credentials.TransportCredentials
	r resource.Reader
}

// ClientHandshake implements credentials.TransportCredentials.
func (f reloading) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	trust, err := trust(f.r)
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(trust).ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (f reloading) Clone() credentials.TransportCredentials { return f }

// trust is the authorities of the members, and this node's client certificate.
func trust(r resource.Reader) (*tls.Config, error) {
	keys, err := secrets.Etcd.Get(r, secrets.EtcdID)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(keys.Spec.Client.Crt, keys.Spec.Client.Key)
	if err != nil {
		return nil, fmt.Errorf("etcd client certificate: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pki.Pool(keys.Spec.CA), Certificates: []tls.Certificate{pair}}, nil
}

// AcceptedBy asks a member for its status with a client certificate of an authority: it fails
// if the member doesn't accept that one.
func AcceptedBy(ctx context.Context, r resource.Reader, member netip.Addr, ca config.CertKey) error {
	trust, err := trust(r)
	crt, key, unmade := ca.CA().Issue(pki.Leaf{CN: "garboard", Client: true, Now: time.Now()})
	if err = cmp.Or(err, unmade); err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		return err
	}
	trust.Certificates = []tls.Certificate{pair}
	c, err := clientv3.New(clientv3.Config{Context: ctx, Endpoints: []string{clientURL(member)}, TLS: trust, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	_, err = c.Status(ctx, clientURL(member))
	return err
}

// list asks for the members: the quorum, unless an option says otherwise.
func list(ctx context.Context, c *clientv3.Client, how ...clientv3.OpOption) (*clientv3.MemberListResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	got, err := c.MemberList(ctx, how...)
	if err != nil {
		return nil, fmt.Errorf("ask etcd at %s for its members: %w", strings.Join(c.Endpoints(), ", "), err)
	}
	return got, nil
}

// api is a client of the cluster's API server, at the endpoint that all nodes use.
func (e *Etcd) api() (*kubeclient.Client, error) {
	keys, err := secrets.Kubernetes.Get(e.o.Store, secrets.KubernetesID)
	if err != nil {
		return nil, err
	}
	return kubeclient.New(keys.Spec.Administrator(keys.Spec.Endpoint, ""))
}

// apiServers is the path of Kubernetes' own list of its API servers.
const apiServers = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes"

// find returns the client URLs of the members on other control planes: an
// etcd runs on each node with an API server.
func (e *Etcd) find(ctx context.Context, me self, patience time.Duration) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := e.api()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	found, err := c.Raw(ctx, apiServers)
	if err != nil {
		return nil, fmt.Errorf("ask Kubernetes for its control planes: %w", err)
	}
	if urls := others(found, me); len(urls) > 0 {
		return urls, nil
	}
	return nil, errNoControlPlane
}

// remembered are the URLs of the API servers that this node's balancer knows, perhaps from
// an earlier boot. A node that has lost its data needs them while the endpoint is gone.
func (e *Etcd) remembered(me self) (urls []string) {
	return lists.Some(balancer.APIServers.List(e.o.Store), func(s resource.Object[balancer.APIServer]) (string, bool) {
		at, err := netip.ParseAddrPort(s.ID)
		return clientURL(at.Addr()), err == nil && s.Spec.From == balancer.FromKubernetes && at.Addr() != me.addr
	})
}

// others are the URLs of a list of EndpointSlices, except this node's own.
func others(found kubeclient.Object, me self) (urls []string) {
	for _, slice := range found.Items() {
		urls = append(urls, lists.Some(balancer.Addresses(slice), func(at netip.AddrPort) (string, bool) {
			return clientURL(at.Addr()), at.Addr() != me.addr
		})...)
	}
	slices.Sort(urls)
	return slices.Compact(urls)
}

// HexID is an ID in etcd's spelling.
func HexID(id uint64) string { return strconv.FormatUint(id, 16) }

// called is the name of a member for users. A member that never ran has no name yet.
func called(m *pb.Member) string {
	return fmt.Sprintf("%s (%s)", cmp.Or(m.Name, "without a name"), HexID(m.ID))
}

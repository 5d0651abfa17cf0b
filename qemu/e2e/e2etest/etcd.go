//go:build e2e

package e2etest

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	etcdPort = 2379
	// callBudget is for one request to one server, which may be cut off.
	callBudget = 5 * time.Second
)

// Secrets returns the secrets with which the cluster was made.
func (c *Cluster) Secrets() *config.Secrets {
	c.t.Helper()
	data, err := os.ReadFile(c.Configuration(c.Node()))
	if err != nil {
		c.t.Fatal(err)
	}
	s, err := config.LoadSecrets(c.Node(), data)
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// as returns the TLS configuration of a client with a new certificate of an authority.
func (c *Cluster) as(ca pki.CA, leaf pki.Leaf) *tls.Config {
	c.t.Helper()
	leaf.Client, leaf.Now = true, time.Now()
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		c.t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		c.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert)
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}}
}

// ControlPlanes returns the nodes that have an etcd and an API server.
func (c *Cluster) ControlPlanes() []qemu.Node {
	var all []qemu.Node
	for _, n := range c.Nodes {
		if n.Type != string(config.Worker) {
			all = append(all, n)
		}
	}
	return all
}

func etcdURL(n qemu.Node) string {
	return "https://" + netip.AddrPortFrom(n.Address, etcdPort).String()
}

// Etcd returns a client of the members on these nodes, like that of an API server.
func (c *Cluster) Etcd(inside *osthread.Thread, nodes ...qemu.Node) *clientv3.Client {
	c.t.Helper()
	var urls []string
	for _, n := range nodes {
		urls = append(urls, etcdURL(n))
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            urls,
		TLS:                  c.as(c.Secrets().EtcdCA.CA(), pki.Leaf{CN: "e2e"}),
		DialKeepAliveTime:    callBudget,
		DialKeepAliveTimeout: callBudget,
		Logger:               zap.NewNop(), // errors are returned
		DialOptions:          []grpc.DialOption{grpc.WithContextDialer(inside.Dial)},
	})
	if err != nil {
		c.t.Fatalf("etcd %v: %v", urls, err)
	}
	c.t.Cleanup(func() { client.Close() })
	return client
}

// Leader returns the node whose etcd reports that it is the leader.
func (c *Cluster) Leader(client *clientv3.Client) (leader qemu.Node, err error) {
	leader, _, err = c.Term(client)
	return leader, err
}

// Term returns the leader and its term. A former leader may still report that it leads: the
// highest term counts.
func (c *Cluster) Term(client *clientv3.Client) (leader qemu.Node, term uint64, err error) {
	for _, n := range c.ControlPlanes() {
		ctx, cancel := eventually.Context(c.t.Context(), c.Scale(callBudget))
		s, one := client.Status(ctx, etcdURL(n))
		cancel()
		if one == nil && s.Leader == s.Header.MemberId && s.RaftTerm > term {
			leader, term = n, s.RaftTerm
		}
		err = errors.Join(err, one)
	}
	if term > 0 {
		return leader, term, nil
	}
	return leader, 0, errors.Join(errors.New("no member of etcd is the leader"), err)
}

// InSync returns nil if the members on these nodes vote, there are no other members, and
// all have the same data.
func (c *Cluster) InSync(client *clientv3.Client, nodes ...qemu.Node) error {
	ctx, cancel := eventually.Context(c.t.Context(), callBudget)
	defer cancel()
	members, err := client.MemberList(ctx)
	if err != nil {
		return err
	}
	if len(members.Members) != len(nodes) {
		return fmt.Errorf("there are %d members, not %d: %v", len(members.Members), len(nodes), members.Members)
	}
	hashes := map[string][]string{} // names by hash
	var revision int64
	for _, m := range members.Members {
		if !slices.ContainsFunc(nodes, func(n qemu.Node) bool { return n.Name == m.Name }) {
			return fmt.Errorf("%q is a member", m.Name)
		}
		if m.IsLearner {
			return fmt.Errorf("%s doesn't vote", m.Name)
		}
		if revision == 0 {
			s, err := client.Status(ctx, m.ClientURLs[0])
			if err != nil {
				return fmt.Errorf("member %s: %w", m.Name, err)
			}
			revision = s.Header.Revision
		}
		h, err := client.HashKV(ctx, m.ClientURLs[0], revision)
		if err != nil {
			return fmt.Errorf("member %s: %w", m.Name, err)
		}
		// Compacted revisions are not in the hash.
		sum := fmt.Sprintf("%x up to %d, compacted up to %d", h.Hash, revision, h.CompactRevision)
		hashes[sum] = append(hashes[sum], m.Name)
	}
	if len(hashes) != 1 {
		return fmt.Errorf("the data differs: %v", hashes)
	}
	return nil
}

package secrets

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
)

// etcdUser is Garboard's own user name for etcd.
const etcdUser = "garboard"

// EtcdController makes etcd's certificates.
type EtcdController struct{ now func() time.Time }

func (c *EtcdController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	n, ok, err := readNode(v)
	if err != nil || !ok || !n.config.Machine.Type.ControlPlane() {
		return 0, err
	}
	ca, accepted := n.config.Cluster.Etcd.CA, n.config.Cluster.Etcd.AcceptedCAs
	if len(ca.Crt) == 0 || len(ca.Key) == 0 {
		return 0, missing("etcd.ca")
	}
	o, _ := Etcd.Get(v, EtcdID) // without one, all are made
	have := o.Spec
	now := c.now()
	// A member is a client of itself for its gRPC gateway, and of its peers.
	member := n.server(pki.Leaf{CN: n.hostname, Client: true, Now: now})
	server, err := keep(config.CertKey{Crt: have.ServerCert, Key: have.ServerKey}, ca, member)
	if err != nil {
		return 0, err
	}
	peer, err := keep(config.CertKey{Crt: have.PeerCert, Key: have.PeerKey}, ca, member)
	if err != nil {
		return 0, err
	}
	client, err := keep(config.CertKey{Crt: have.ClientCert, Key: have.ClientKey}, ca, pki.Leaf{CN: etcdUser, Client: true, Now: now})
	if err != nil {
		return 0, err
	}
	authorities, err := n.digests(config.EtcdAuthority)
	if err != nil {
		return 0, err
	}
	spec := EtcdSpec{
		CA:         config.Trusted(ca, accepted),
		ServerCert: server.Crt, ServerKey: server.Key,
		PeerCert: peer.Crt, PeerKey: peer.Key,
		ClientCert: client.Crt, ClientKey: client.Key,
		Authorities: authorities,
	}
	return renewal(now, server.Crt, peer.Crt, client.Crt), Etcd.Put(v, EtcdID, spec)
}

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
	o, _ := Etcd.Get(v, EtcdID) // without one, all are made
	spec, now := o.Spec, c.now()
	// A member is a client of itself for its gRPC gateway, and of its peers.
	member := n.server(pki.Leaf{CN: n.hostname, Client: true, Now: now})
	for _, c := range []struct {
		pair *config.CertKey
		want pki.Leaf
	}{{&spec.Server, member}, {&spec.Peer, member}, {&spec.Client, pki.Leaf{CN: etcdUser, Client: true, Now: now}}} {
		if *c.pair, err = keep(*c.pair, ca, c.want); err != nil {
			return 0, err
		}
	}
	spec.CA = config.Trusted(ca, accepted)
	if spec.Authorities, err = n.digests(config.EtcdAuthority); err != nil {
		return 0, err
	}
	return renewal(now, spec.Server.Crt, spec.Peer.Crt, spec.Client.Crt), Etcd.Put(v, EtcdID, spec)
}

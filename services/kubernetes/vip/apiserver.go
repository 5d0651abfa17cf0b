package vip

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// checkEvery is how often this node's API server is checked, and checkTimeout how long
	// one check may take.
	checkEvery   = time.Second
	checkTimeout = 2 * time.Second

	ready = "/readyz"
	// readyAlone leaves out the checks that need etcd's quorum. A holder keeps the address
	// without a quorum: no other node would be better.
	readyAlone = ready + "?exclude=etcd&exclude=etcd-readiness"
)

// checker checks this node's API server over one connection.
type checker struct {
	store  *resource.Store
	client *kubeclient.Client
	made   uint64 // version of the secrets that client was made of
}

// check requests one of the paths above.
func (c *checker) check(ctx context.Context, path string) error {
	keys, err := secrets.Kubernetes.Get(c.store, secrets.KubernetesID)
	if err != nil {
		return err
	}
	if c.client == nil || c.made != keys.Version {
		c.close()
		k := keys.Spec
		if c.client, err = kubeclient.New(kubeclient.Options{Server: k.LocalEndpoint, CA: k.Trusted, Cert: k.Admin.Crt, Key: k.Admin.Key}); err != nil {
			return err
		}
		c.made = keys.Version
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	_, err = c.client.Text(ctx, path)
	return err
}

func (c *checker) close() {
	if c.client != nil {
		c.client.Close()
	}
}

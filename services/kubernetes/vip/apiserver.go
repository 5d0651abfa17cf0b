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

// askAPIServer requests one of the paths above from this node's API server, over one connection.
func askAPIServer(ctx context.Context, store *resource.Store, client *kubeclient.Kept, path string) error {
	keys, err := secrets.Kubernetes.Get(store, secrets.KubernetesID)
	if err != nil {
		return err
	}
	if err := client.Use(keys.Spec.Administrator(keys.Spec.LocalEndpoint, "")); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	_, err = client.Text(ctx, path)
	return err
}

package controlplane

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
)

// StaticPodController renders the pods, after etcd is up (S-216): an apiserver
// that starts without it only fails.
type StaticPodController struct{ filesDir, auditDir, secretsDir string }

func (c *StaticPodController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	status, err := secrets.Statuses.Get(v, secrets.KubernetesID)
	if err != nil {
		return 0, ignoreNotFound(err)
	}
	address, err := network.Addresses.Get(v, network.AddressID)
	if err != nil {
		return 0, ignoreNotFound(err)
	}
	// Only at first: a restart of etcd is no reason to remove the pods.
	if _, ready := etcd.Ready(v); !ready && len(StaticPods.List(v)) == 0 {
		return 0, nil
	}
	for _, o := range Configs.List(v) {
		pod, err := staticPod(podInput{
			config:         o.Spec,
			configVersion:  o.Version,
			secretsVersion: status.Spec.Version,
			address:        address.Spec.Primary,
			secretsDir:     c.secretsDir,
			filesDir:       c.filesDir,
			auditDir:       c.auditDir,
		})
		if err != nil {
			return 0, err
		}
		if err := StaticPods.Put(v, o.ID, pod); err != nil {
			return 0, fmt.Errorf("put static pod %q: %w", o.ID, err)
		}
	}
	return 0, nil
}

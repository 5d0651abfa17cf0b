package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// StaticPodController publishes the programs' configurations. It renders the pods after etcd is up: an apiserver
// that starts without it only fails.
type StaticPodController struct{ filesDir, auditDir, secretsDir string }

func (c *StaticPodController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	cfg, err := controlPlaneConfig(v)
	if err != nil || cfg == nil {
		return 0, err
	}
	for _, spec := range programConfigs(&cfg.Cluster) {
		if err := Configs.Put(v, spec.program(), spec); err != nil {
			return 0, err
		}
	}
	status, err := secrets.Statuses.Get(v, secrets.KubernetesID)
	address, none := advertised(v)
	if err = cmp.Or(err, none); err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	// Only at first: a restart of etcd is no reason to remove the pods.
	issuers := issuersOf(v)
	if _, ready := etcd.Ready(v); (!ready || issuers == nil) && len(StaticPods.List(v)) == 0 {
		return 0, nil
	}
	var problems []error
	for _, o := range Configs.List(v) {
		pod, err := staticPod(podInput{
			program:        o.ID,
			cluster:        &cfg.Cluster,
			configVersion:  o.Version,
			issuers:        issuers,
			secretsVersion: cmp.Or(status.Spec.Programs[o.ID], status.Spec.Version),
			address:        address,
			secretsDir:     c.secretsDir,
			filesDir:       c.filesDir,
			auditDir:       c.auditDir,
		})
		problems = append(problems, err)
		if pod == nil {
			continue
		}
		if err := StaticPods.Put(v, o.ID, pod); err != nil {
			return 0, fmt.Errorf("put static pod %q: %w", o.ID, err)
		}
	}
	return 0, errors.Join(problems...)
}

// advertised is the node's address for the Service kubernetes, whose family is that of the first subnet.
func advertised(r resource.Reader) (netip.Addr, error) {
	c, err := configuration.Configs.Get(r, configuration.ConfigID)
	a, none := network.Addresses.Get(r, network.AddressID)
	if err = cmp.Or(err, none); err != nil {
		return netip.Addr{}, err
	}
	return c.Spec.Cluster.Network.NodeIPs(a.Spec.Primary, a.Spec.All)[0], nil
}

// Rendered is the static pod that this node would write for a program with an image.
func Rendered(r resource.Reader, name, image string) (kubeclient.Object, error) {
	c, err := configuration.Config(r)
	address, none := advertised(r)
	if err = cmp.Or(err, none); err != nil {
		return nil, err
	}
	cluster := c.Cluster
	cluster.APIServer.Image, cluster.ControllerManager.Image, cluster.Scheduler.Image = image, image, image
	if !slices.Contains(Programs, name) {
		return nil, fmt.Errorf("%s is no program of the control plane", name)
	}
	return staticPod(podInput{program: name, cluster: &cluster, issuers: issuersOf(r), address: address, secretsDir: filepath.Join(boot.SecretsDir, "kubernetes"), filesDir: filesDir, auditDir: auditDir})
}

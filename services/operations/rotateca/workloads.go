package rotateca

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// rootCA is the ConfigMap in each namespace from which pods get the authority.
	rootCA = "kube-root-ca.crt"
	// restartedBy is on the pods of workloads that were restarted: the ID of the operation.
	restartedBy = "garboard.dev/restarted-by"
)

// authentication is the ConfigMap from which extension API servers get the authorities.
var authentication = kubeclient.Ref{APIVersion: "v1", Kind: "ConfigMap", Namespace: "kube-system", Name: "extension-apiserver-authentication"}

// workloads restarts the node's own workloads, which read the authority at their start.
func (j job) workloads(ctx context.Context, p *operation.Progress, r rotation) error {
	return j.Kubernetes.With(func(client *kubeclient.Client) error {
		if err := rollout.Poll(ctx, p, func(ctx context.Context) error { return published(ctx, client, r) }); err != nil {
			return err
		}
		for _, w := range controlplane.WantedObjects(j.Store) {
			if w.Kind() != "DaemonSet" && w.Kind() != "Deployment" {
				continue
			}
			if err := restart(ctx, p, client, w, j.id); err != nil {
				return err
			}
		}
		return nil
	})
}

func restart(ctx context.Context, p *operation.Progress, client *kubeclient.Client, w kubeclient.Object, id string) error {
	ref := w.Ref()
	there := true
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error {
		_, err := client.Merge(ctx, ref, kubeclient.Object{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{"annotations": map[string]any{restartedBy: id}}}}})
		if kubeclient.IsNotFound(err) {
			there, err = false, nil
		}
		return err
	}); err != nil || !there {
		return err
	}
	if err := rollout.AwaitWorkload(ctx, p, client, ref); err != nil {
		return err
	}
	p.Report("restarted %s", w)
	return nil
}

// published says in which namespace pods don't get the new authority yet.
func published(ctx context.Context, client *kubeclient.Client, r rotation) error {
	list, err := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "ConfigMap"}, kubeclient.Selection{Fields: "metadata.name=" + rootCA})
	for _, m := range list.Items() {
		if !strings.Contains(m.Text("data", "ca.crt"), string(bytes.TrimSpace(r.New[config.KubernetesAuthority]))) {
			return fmt.Errorf("configmap %s of namespace %s doesn't have the new authority yet", rootCA, m.Namespace())
		}
	}
	return err
}

// forget removes the old authorities where API servers only ever add some.
func (o Options) forget(ctx context.Context, client *kubeclient.Client, r rotation) error {
	own, err := configuration.Config(o.Store)
	if err != nil {
		return err
	}
	m, err := client.Get(ctx, authentication)
	if err != nil {
		return err
	}
	data := map[string]any{}
	for key, now := range map[string]struct {
		name    string
		trusted config.PEM
	}{
		"client-ca-file":               {config.KubernetesAuthority, own.Cluster.TrustedCAs()},
		"requestheader-client-ca-file": {config.AggregatorAuthority, config.Trusted(own.Cluster.AggregatorCA, own.Cluster.AcceptedAggregatorCAs)},
	} {
		for _, old := range r.Former[now.name] {
			if strings.Contains(m.Text("data", key), string(bytes.TrimSpace(old))) {
				data[key] = string(now.trusted)
			}
		}
	}
	if len(data) == 0 {
		return nil
	}
	if _, err := client.Merge(ctx, authentication, kubeclient.Object{"data": data}); err != nil {
		return err
	}
	return fmt.Errorf("configmap %s had an old authority, and is checked again", authentication.Name)
}

package controlplane

import (
	"context"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes"
	"github.com/garboard-os/garboard/services/machine"
	"github.com/garboard-os/garboard/services/network"
	"github.com/garboard-os/garboard/services/resource"
	"github.com/garboard-os/garboard/services/secrets"
)

const (
	// controlPlaneRole is both the label of a control plane node and the key of its
	// taint.
	controlPlaneRole = "node-role.kubernetes.io/control-plane"
	labelTask        = "labelNodeAsControlPlane"
	// labelBudget bounds one attempt; the next one follows.
	labelBudget = 15 * time.Second
)

// NodeLabelController marks the node as a control plane and keeps its taint as the
// configuration wants it (S-221). The kubelet registers the taint but may not set
// the label itself: the NodeRestriction plugin forbids that.
type NodeLabelController struct {
	say  func(format string, args ...any) // to the console
	told bool                             // the start of the task was said
}

// Name implements resource.Controller.
func (*NodeLabelController) Name() string { return "k8s.NodeLabelController" }

// Inputs implements resource.Controller.
func (*NodeLabelController) Inputs() []resource.Input {
	return []resource.Input{
		{Type: machine.Configs.Type(), ID: machine.ConfigID}, {Type: network.Hostnames.Type()}, {Type: secrets.Kubernetes.Type()}, {Type: StaticPodStatuses.Type()},
	}
}

// Outputs implements resource.Controller.
func (*NodeLabelController) Outputs() []string { return nil }

// Reconcile implements resource.Controller.
func (c *NodeLabelController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := controlPlaneConfig(v)
	if err != nil || cfg == nil {
		return 0, err
	}
	hostname, err := network.Hostnames.Get(v, network.HostnameID)
	if err != nil {
		return 0, ignoreNotFound(err)
	}
	keys, err := secrets.Kubernetes.Get(v, secrets.KubernetesID)
	if err != nil {
		return 0, ignoreNotFound(err)
	}
	client, err := adminClient(keys.Spec)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, labelBudget)
	defer cancel()
	if err := client.Ready(ctx); err != nil {
		return soon, nil // others say that the apiserver is down; this task waits for it
	}
	if !c.told {
		c.told = true
		c.say("task %s (1/1): starting", labelTask) // S-255
	}
	ref := kubernetes.Ref{APIVersion: "v1", Kind: "Node", Name: hostname.Spec}
	node, err := client.Get(ctx, ref)
	if kubernetes.IsNotFound(err) {
		return soon, nil // the kubelet hasn't registered it yet
	}
	if err != nil {
		c.say("retrying error: %v", err)
		return 0, err
	}
	patch := nodePatch(cfg, node)
	if patch == nil {
		return 0, nil
	}
	if _, err := client.Merge(ctx, ref, patch); err != nil {
		c.say("retrying error: %v", err)
		return 0, err
	}
	c.say("task %s (1/1): done", labelTask)
	return 0, nil
}

// nodePatch is what has to change on the node; nil if nothing.
func nodePatch(c *config.Config, node kubernetes.Object) kubernetes.Object {
	patch := kubernetes.Object{}
	labels, _ := node.At("metadata", "labels").(map[string]any)
	if _, labelled := labels[controlPlaneRole]; !labelled {
		patch["metadata"] = object{"labels": object{controlPlaneRole: ""}}
	}
	taints, _ := node.At("spec", "taints").([]any)
	isOurs := func(t any) bool {
		m, _ := t.(map[string]any)
		return m["key"] == controlPlaneRole && m["effect"] == "NoSchedule"
	}
	wanted := !c.Cluster.AllowSchedulingOnControlPlanes
	if tainted := slices.ContainsFunc(taints, isOurs); tainted != wanted {
		kept := slices.DeleteFunc(slices.Clone(taints), isOurs)
		if wanted {
			kept = append(kept, object{"key": controlPlaneRole, "effect": "NoSchedule"})
		}
		patch["spec"] = object{"taints": kept}
		// A merge patch replaces the whole list: not if somebody changed it meanwhile.
		meta, _ := patch["metadata"].(map[string]any)
		if meta == nil {
			meta = object{}
		}
		meta["resourceVersion"] = node.ResourceVersion()
		patch["metadata"] = meta
	}
	if len(patch) == 0 {
		return nil
	}
	return patch
}

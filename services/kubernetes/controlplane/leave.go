package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

const (
	// leaveWatch is the duration of one watch of the nodes, and leaveRetry the
	// pause while there is no API server.
	leaveWatch = 5 * time.Minute
	leaveRetry = 5 * time.Second

	// systemTaint is the prefix of the taints that Kubernetes itself adds and removes.
	systemTaint = "node.kubernetes.io/"
	// restrictedLabel is the prefix of labels that a kubelet must not set on its
	// node (NodeRestriction).
	restrictedLabel = "node-restriction.kubernetes.io/"
)

// NodeLeaveController deletes the Nodes of workers that are being reset and ask for it. Kubernetes doesn't let a
// kubelet delete its own Node: the kubelet could register again without the taints that keep certain pods away from it,
// and get these pods. So a node is deleted only if it has none of these taints and labels, but those that control
// planes keep for it, and a false request gains nothing. Otherwise its administrator has to delete it.
//
// The machine proves that it asks, with the key of its machine API: whoever may write to a
// Node ends none, and neither does a machine that had the name before.
type NodeLeaveController struct {
	roster  func(ctx context.Context) (roster.Facts, error)
	refused map[string]string
}

// Reconcile stays in the watch, as ApprovalController does.
func (c *NodeLeaveController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	client, err := AdminClient(v)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	defer client.Close()
	if client.Ready(ctx) != nil {
		return leaveRetry, nil // other controllers report that the apiserver is down
	}
	list, err := client.List(ctx, allNodes, kubeclient.Selection{})
	if err != nil {
		return 0, err
	}
	seen := map[string]string{}
	for _, node := range list.Items() {
		if !leaving(node) {
			continue
		}
		if why := c.mayLeave(ctx, v, node); why != "" {
			if seen[node.Name()] = why; c.refused[node.Name()] != why {
				v.Log().Warn(fmt.Sprintf("node %s is being reset, but isn't deleted: %s; `kubectl delete node %s` deletes it", node.Name(), why, node.Name()))
			}
			continue
		}
		if err := client.Delete(ctx, kubeclient.NodeRef(node.Name())); err != nil {
			return 0, err
		}
		v.Log().Info(fmt.Sprintf("node %s is being reset: deleted", node.Name()))
	}
	c.refused = seen
	return watchUntil(ctx, client, allNodes, list, leaveWatch, leaveRetry, func(e kubeclient.Event) bool {
		if e.Type == kubeclient.Deleted || !leaving(e.Object) {
			return false
		}
		why := c.mayLeave(ctx, v, e.Object)
		return why == "" || why != seen[e.Object.Name()]
	}), nil
}

// leaving: the node asks to be deleted.
func leaving(node kubeclient.Object) bool {
	return node.Text("metadata", "annotations", kubeclient.Leaving) != ""
}

// mayLeave says why a node isn't deleted: its machine doesn't ask for that, or it would lose
// what others have set. It is "" if the node may leave.
func (c *NodeLeaveController) mayLeave(ctx context.Context, r resource.Reader, node kubeclient.Object) (why string) {
	facts, err := c.roster(ctx)
	proof := node.Text("metadata", "annotations", kubeclient.LeavingProof)
	by, unproven := provenBy(r, proof, kubeclient.LeavePurpose, []byte(node.Text("metadata", "uid")), node.Name(), time.Now())
	had, known := facts.Record(node.Name())
	switch err = cmp.Or(err, unproven); {
	case err != nil:
		return err.Error()
	case known && had.Key != by.Key, facts.Records == nil: // or this control plane is no member of etcd yet
		return "the machine that asks isn't the one that has the name"
	}
	for _, taint := range node.List("spec", "taints") {
		if key := taint.Text("key"); !strings.HasPrefix(key, systemTaint) && !slices.Contains(had.Taints, key+"="+taint.Text("effect")) {
			return fmt.Sprintf("it has the taint %q", key)
		}
	}
	labels, _ := node.At("metadata", "labels").(map[string]any)
	for key := range labels {
		if strings.HasPrefix(key, restrictedLabel) {
			return fmt.Sprintf("it has the label %q", key)
		}
	}
	return ""
}

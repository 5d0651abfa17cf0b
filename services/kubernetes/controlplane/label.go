package controlplane

import (
	"cmp"
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	labelTask = "labelNodeAsControlPlane"
	// labelBudget limits one attempt; the next one follows.
	labelBudget = 15 * time.Second
	// labelLater is the interval at which a worker checks whether its kubelet has joined.
	labelLater = time.Second
	// labelKept is the interval at which the node's labels and taints are looked at, as others may change them.
	labelKept = time.Minute

	// Annotations of the node record its labels and taints that come from the
	// configuration, so that they are removed when they leave it: keys, separated
	// by commas; for a taint with an equals sign and its effect.
	labelsAnnotation = "garboard.dev/labels"
	taintsAnnotation = "garboard.dev/taints"
)

// NodeLabelController keeps the node's labels and taints as configured. The
// kubelet registers the node with them. Later changes of the configuration are
// made here, and so is the label of a control plane (S-221), which the
// NodeRestriction plugin forbids to the kubelet.
//
// A control plane makes them as the cluster's administrator. A worker makes them as its
// own kubelet, which may set the labels that the configuration allows, but no taints.
type NodeLabelController struct {
	printf        func(format string, args ...any) // to the console
	kubeletClient string
	machineID     string // the file
	announced     bool   // the start of the task was reported
}

func (c *NodeLabelController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := machine.Config(v)
	hostname, none := network.Hostnames.Get(v, network.HostnameID)
	if err = cmp.Or(err, none); err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	later := soon
	client, err := c.client(v, cfg)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	if !cfg.Machine.Type.ControlPlane() {
		later = labelLater
	}
	if client == nil {
		return later, nil
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, labelBudget)
	defer cancel()
	if err := client.Ready(ctx); err != nil {
		return later, nil // other controllers report that the apiserver is down; this task waits for it
	}
	if !c.announced && cfg.Machine.Type.ControlPlane() {
		c.announced = true
		c.printf("task %s (1/1): starting", labelTask) // S-255
	}
	ref := kubeclient.NodeRef(hostname.Spec)
	node, err := client.Get(ctx, ref)
	own, _ := os.ReadFile(c.machineID)
	if id := node.Text("status", "nodeInfo", "machineID"); kubeclient.IsNotFound(err) || id != "" && id != strings.TrimSpace(string(own)) {
		return later, nil // the kubelet hasn't registered it yet; it waits while another machine has the name
	}
	if err != nil {
		c.printf("retrying error: %v", err)
		return 0, err
	}
	patch := nodePatch(cfg, node)
	if patch == nil {
		return labelKept, nil
	}
	if _, err := client.Merge(ctx, ref, patch); err != nil {
		c.printf("retrying error: %v", err)
		return 0, err
	}
	if cfg.Machine.Type.ControlPlane() {
		c.printf("task %s (1/1): done", labelTask)
	}
	v.Log().Info("labels and taints of the node are those of the configuration")
	return labelKept, nil
}

// client is nil while a worker's kubelet hasn't joined.
func (c *NodeLabelController) client(v resource.View, cfg *config.Config) (*kubeclient.Client, error) {
	switch {
	case cfg.Machine.Type.ControlPlane():
		return ownAdmin(v)
	case !untrusted.Exists(c.kubeletClient):
		return nil, nil
	}
	return WorkerClient(cfg, c.kubeletClient)
}

// WorkerClient is a client of the cluster's API as a kubelet, whose certificate is in a file.
func WorkerClient(cfg *config.Config, certFile string) (*kubeclient.Client, error) {
	return kubeclient.New(kubeclient.Options{Server: balancer.URL, ServerName: balancer.ServerName, CA: cfg.Cluster.TrustedCAs(), CertFile: certFile})
}

// nodePatch is the change of the node; nil if there is none.
func nodePatch(c *config.Config, node kubeclient.Object) kubeclient.Object {
	labels, annotations := labelChanges(c, node)
	meta := object{}
	patch := kubeclient.Object{}
	if c.Machine.Type.ControlPlane() {
		if taints, changed := taintsOf(c, node); changed {
			patch["spec"] = object{"taints": taints}
			// A merge patch replaces the whole list: it must fail if the list was changed meanwhile.
			meta["resourceVersion"] = node.ResourceVersion()
		}
		var keys []string
		for key, t := range c.Machine.Kubelet.NodeTaints {
			keys = append(keys, key+"="+t.Effect)
		}
		note(annotations, node, taintsAnnotation, keys)
	}
	if len(labels) > 0 {
		meta["labels"] = labels
	}
	if len(annotations) > 0 {
		meta["annotations"] = annotations
	}
	if len(meta) > 0 {
		patch["metadata"] = meta
	}
	if len(patch) == 0 {
		return nil
	}
	return patch
}

// labelChanges are the labels to set, with nil for those to remove, and the
// annotation of the configuration's labels.
func labelChanges(c *config.Config, node kubeclient.Object) (labels, annotations object) {
	labels, annotations = object{}, object{}
	have, _ := node.At("metadata", "labels").(map[string]any)
	wanted := maps.Clone(c.Machine.Kubelet.NodeLabels)
	for _, key := range noted(node, labelsAnnotation) {
		if _, still := wanted[key]; !still && have[key] != nil {
			labels[key] = nil
		}
	}
	note(annotations, node, labelsAnnotation, slices.Collect(maps.Keys(wanted)))
	if c.Machine.Type.ControlPlane() {
		if wanted == nil {
			wanted = map[string]string{}
		}
		wanted[config.ControlPlaneRole] = ""
	}
	for key, value := range wanted {
		if have[key] != value {
			labels[key] = value
		}
	}
	return labels, annotations
}

// taintsOf are the wanted taints of the node: taints by others stay.
func taintsOf(c *config.Config, node kubeclient.Object) (taints list, changed bool) {
	wanted := c.Taints()
	ours := noted(node, taintsAnnotation)
	ours = append(ours, config.ControlPlaneRole+"=NoSchedule")
	have, _ := node.At("spec", "taints").([]any)
	taints = list{}
	for _, t := range have {
		taint, _ := t.(map[string]any)
		key, _ := taint["key"].(string)
		effect, _ := taint["effect"].(string)
		value, _ := taint["value"].(string)
		want, is := wanted[key]
		switch {
		case is && want.Effect == effect && want.Value == value:
			delete(wanted, key)
			taints = append(taints, t)
		case is && want.Effect == effect, slices.Contains(ours, key+"="+effect):
			changed = true // it is added below, or was removed
		default:
			taints = append(taints, t)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		taint := object{"key": key, "effect": wanted[key].Effect}
		if value := wanted[key].Value; value != "" {
			taint["value"] = value
		}
		taints, changed = append(taints, taint), true
	}
	return taints, changed
}

// noted is the list in an annotation of the node.
func noted(node kubeclient.Object, annotation string) []string {
	annotations, _ := node.At("metadata", "annotations").(map[string]any)
	text, _ := annotations[annotation].(string)
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}

// note adds the annotation to the changes, if it differs.
func note(changes object, node kubeclient.Object, annotation string, keys []string) {
	slices.Sort(keys)
	switch {
	case slices.Equal(keys, noted(node, annotation)):
	case len(keys) == 0:
		changes[annotation] = nil
	default:
		changes[annotation] = strings.Join(keys, ",")
	}
}

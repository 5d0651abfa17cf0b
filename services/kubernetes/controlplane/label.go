package controlplane

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
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
	// taintsKept is the least such interval for what workers ask for: a second for each node, as all are read.
	taintsKept = 5 * time.Second

	// Annotations of the node record its labels that come from the configuration, and the taints of a
	// control plane, so that they are removed when they leave it: keys, separated
	// by commas; for a taint with an equals sign and its effect.
	labelsAnnotation = "garboard.dev/labels"
	taintsAnnotation = "garboard.dev/taints"

	// With these annotations of its Node, the machine of a worker asks for the taints of its configuration (JSON), and
	// proves that it asks, with the key of its machine API. The proof counts for this Node only.
	wantedAnnotation = "garboard.dev/wanted-taints"
	wantedProof      = "garboard.dev/wanted-taints-proof"
	taintPurpose     = "taints of a node"
	// maxWanted bounds what a worker can have recorded in etcd, in bytes.
	maxWanted = 4 << 10
	// registers is how long a new Node has to say which of its taints it was registered with. What it says later isn't
	// believed: an administrator may have added them.
	registers = 5 * time.Minute
)

// NodeLabelController keeps the node's labels and taints as configured. The
// kubelet registers the node with them. Later changes of the configuration are
// made here, and so is the label of a control plane, which the
// NodeRestriction plugin forbids to the kubelet.
//
// A control plane makes them as the cluster's administrator. A worker makes them as its
// own kubelet, which may set the labels that the configuration allows, but no taints
// (NodeRestriction). It asks for these, and control planes keep them:
//
//	worker ── taints, proof with the key of the machine API ──▶ annotations of its Node ──▶ control plane ── taints ──▶ Node
//	                                                                                             ⇅
//	                                            etcd: the key that has the name, and which taints are the worker's
//
// The worker's are those that it registered with, and those that a control plane has added for it. So whoever has
// taken a worker over can't take from it what an administrator has put there.
type NodeLabelController struct {
	roster        func(ctx context.Context) (roster.Facts, error)
	enlist        func(ctx context.Context, name string, r roster.Record) error
	printf        func(format string, args ...any) // to the console
	kubeletClient string
	machineID     string // the file
	announced     bool   // the start of the task was reported
}

func (c *NodeLabelController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := configuration.Config(v)
	hostname, none := network.Hostnames.Get(v, network.HostnameID)
	if err = cmp.Or(err, none); err != nil || cfg.SelfHosted() { // its pods don't tolerate what is wanted yet
		return 0, resource.IgnoreNotFound(err)
	}
	later := soon
	if !cfg.Machine.Type.ControlPlane() {
		if later = labelLater; !untrusted.Exists(c.kubeletClient) {
			return later, nil // its kubelet hasn't joined
		}
	}
	client, err := NodeClient(v, c.kubeletClient)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, labelBudget)
	defer cancel()
	if err := client.Ready(ctx); err != nil {
		return later, nil // other controllers report that the apiserver is down; this task waits for it
	}
	if !c.announced && cfg.Machine.Type.ControlPlane() {
		c.announced = true
		c.printf("task %s (1/1): starting", labelTask)
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
	asks, err := asksForTaints(v, cfg, node) // without a proof, the labels are kept nevertheless
	if patch := nodePatch(cfg, node, asks); patch != nil {
		if _, err := client.Merge(ctx, ref, patch); err != nil {
			c.printf("retrying error: %v", err)
			return 0, err
		}
		if cfg.Machine.Type.ControlPlane() {
			c.printf("task %s (1/1): done", labelTask)
		}
		v.Log().Info("labels and taints of the node are those of the configuration")
	}
	if cfg.Machine.Type.ControlPlane() {
		return c.keepTaints(ctx, v, client)
	}
	return labelKept, err
}

// NodeClient is a client of the cluster's API with the rights of this node: a control plane's own as its administrator,
// a worker's as its kubelet, whose certificate is in a file.
func NodeClient(r resource.Reader, certFile string) (*kubeclient.Client, error) {
	cfg, err := configuration.Config(r)
	if err == nil && !cfg.Machine.Type.ControlPlane() {
		return kubeclient.New(balancer.Client(cfg, certFile))
	}
	return AdminClient(r)
}

// nodePatch is the change of the node, with these annotations; nil if there is none.
func nodePatch(c *config.Config, node kubeclient.Object, asks object) kubeclient.Object {
	labels, annotations := labelChanges(c, node)
	maps.Copy(annotations, asks)
	meta := object{}
	patch := kubeclient.Object{}
	if c.Machine.Type.ControlPlane() {
		wanted := c.Taints()
		ours := slices.Concat(noted(node, taintsAnnotation), taintKeys(wanted), []string{config.ControlPlaneRole + "=NoSchedule"})
		if taints, changed := taintsOf(wanted, ours, node); changed {
			patch["spec"] = object{"taints": taints}
			// A merge patch replaces the whole list: it must fail if the list was changed meanwhile.
			meta["resourceVersion"] = node.ResourceVersion()
		}
		note(annotations, node, taintsAnnotation, taintKeys(c.Machine.Kubelet.NodeTaints))
	}
	if len(labels) > 0 {
		meta["labels"] = labels
	}
	if len(annotations) > 0 {
		meta["annotations"] = annotations
	}
	if len(meta) == 0 {
		return nil
	}
	patch["metadata"] = meta
	return patch
}

// asksForTaints are the annotations with which a worker asks for its taints; none if it has asked.
func asksForTaints(r resource.Reader, c *config.Config, node kubeclient.Object) (object, error) {
	asked, _ := node.At("metadata", "annotations").(map[string]any)
	own, err := secrets.API.Get(r, secrets.APIID)
	if err != nil || c.Machine.Type.ControlPlane() || asked[wantedAnnotation] == nil && len(c.Taints()) == 0 {
		return nil, resource.IgnoreNotFound(err) // without a certificate, there is no proof yet
	}
	wanted, err := json.Marshal(c.Taints())
	proof, _ := asked[wantedProof].(string)
	if err != nil || asked[wantedAnnotation] == string(wanted) && strings.Contains(proof, base64.StdEncoding.EncodeToString(own.Spec.Serving.Crt)) {
		return nil, err
	}
	made, err := secrets.Prove(r, taintPurpose, []byte(node.Text("metadata", "uid")+" "+string(wanted)))
	return object{wantedAnnotation: string(wanted), wantedProof: string(made)}, err
}

// keepTaints gives all workers the taints for which their machines ask. What is wrong with one of them concerns no
// other one.
func (c *NodeLabelController) keepTaints(ctx context.Context, v resource.View, client *kubeclient.Client) (again time.Duration, err error) {
	facts, err := c.roster(ctx)
	list, none := client.List(ctx, allNodes, kubeclient.Selection{})
	nodes := list.Items()
	for _, node := range nodes {
		if err := c.keepTaintsOf(ctx, v, client, facts, node); err != nil {
			v.Log().Warn(fmt.Sprintf("node %s doesn't have the taints of its configuration: %v", node.Name(), err))
		}
	}
	return min(labelKept, max(taintsKept, time.Duration(len(nodes))*time.Second)), cmp.Or(err, none)
}

func (c *NodeLabelController) keepTaintsOf(ctx context.Context, r resource.Reader, client *kubeclient.Client, facts roster.Facts, node kubeclient.Object) error {
	text := node.Text("metadata", "annotations", wantedAnnotation)
	record, known := facts.Record(node.Name())
	if text == "" || !known {
		return nil // a node of a former release asks for none
	}
	wanted, had := map[string]config.Taint{}, record.Taints
	if err := json.Unmarshal([]byte(text[:min(len(text), maxWanted)]), &wanted); err != nil {
		return err
	}
	maps.DeleteFunc(wanted, func(key string, _ config.Taint) bool { return strings.HasPrefix(key, systemTaint) })
	keys := taintKeys(wanted)
	if had == nil && facts.Now.Sub(node.Time("metadata", "creationTimestamp")) < registers {
		record.Taints = keys
	}
	taints, changed := taintsOf(wanted, record.Taints, node) // wanted has the added ones now
	// A taint is the worker's before it is on the Node, and until it isn't any more.
	record.Taints = slices.DeleteFunc(slices.Concat(record.Taints, taintKeys(wanted)), func(key string) bool { return !changed && !slices.Contains(keys, key) })
	slices.Sort(record.Taints)
	if record.Taints = slices.Compact(record.Taints); !changed && slices.Equal(record.Taints, had) {
		return nil
	}
	by, err := provenBy(r, node.Text("metadata", "annotations", wantedProof), taintPurpose, []byte(node.Text("metadata", "uid")+" "+text), node.Name(), facts.Now)
	if err == nil && by.Key != record.Key {
		err = errors.New("the machine that asks isn't the one that has the name")
	}
	if err == nil {
		err = c.enlist(ctx, node.Name(), record)
	}
	if err == nil && changed {
		patch := kubeclient.Object{"metadata": object{"resourceVersion": node.ResourceVersion()}, "spec": object{"taints": taints}}
		_, err = client.Merge(ctx, kubeclient.NodeRef(node.Name()), patch)
	}
	return err
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

// taintKeys are taints as they are noted.
func taintKeys(taints map[string]config.Taint) []string {
	return lists.Of(slices.Sorted(maps.Keys(taints)), func(key string) string { return key + "=" + taints[key].Effect })
}

// taintsOf are the taints of the node with the wanted ones, and without those of ours that aren't wanted. Taints by
// others stay, also in the place of wanted ones. What is left in wanted was added.
func taintsOf(wanted map[string]config.Taint, ours []string, node kubeclient.Object) (taints list, changed bool) {
	taints = list{}
	for _, t := range node.List("spec", "taints") {
		want, is := wanted[t.Text("key")]
		mine := slices.Contains(ours, t.Text("key")+"="+t.Text("effect"))
		if is && want.Effect == t.Text("effect") && (want.Value == t.Text("value") || !mine) {
			delete(wanted, t.Text("key"))
		} else if mine {
			changed = true // it is added below, or was removed
			continue
		}
		taints = append(taints, object(t))
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		taints, changed = append(taints, object{"key": key, "value": wanted[key].Value, "effect": wanted[key].Effect}), true
	}
	return taints, changed
}

// noted is the list in an annotation of the node.
func noted(node kubeclient.Object, annotation string) []string {
	return strings.FieldsFunc(node.Text("metadata", "annotations", annotation), func(r rune) bool { return r == ',' })
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

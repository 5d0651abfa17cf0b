package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// HealthID is the ID of the one NodeHealth.
	HealthID = "node"
	// NodeObject is the object of a fault of the Node itself.
	NodeObject = "Node"
	// Unknown is NodeHealth.Serves while no API server answers.
	Unknown = "unknown"

	// healthSoon is between two looks while something is wrong, and healthLater else, and where no API server answers
	// for long.
	healthSoon  = 2 * time.Second
	healthLater = 10 * time.Second
	// silence is how long no API server may answer about a node that was healthy: one that is restarted is back by
	// then, and Kubernetes itself waits almost as long for a kubelet.
	silence = time.Minute
	// settled is when everything that a kubelet reports is of this boot. Before, what it has reported in an earlier one
	// doesn't count, as far as the clock tells; and the clock may be set in this time.
	settled = 5 * time.Minute
	// maxFault bounds the text of a fault: pods may write it.
	maxFault = 300

	// Reasons of faults that Kubernetes has no word for: no API server answers; Kubernetes has no Node of this name;
	// what it knows is from before this boot; a DaemonSet has no pod here that stays.
	NoAnswer   reason.Code = "NoAnswer"
	NoNode     reason.Code = "NoNode"
	FormerBoot reason.Code = "FormerBoot"
	NoPod      reason.Code = "NoPod"
)

// Fault is what keeps Kubernetes from serving on this node.
type Fault struct {
	// Object is Node, or the DaemonSet of a pod. It is the same in the next boot.
	Object string      `yaml:"object"`
	Code   reason.Code `yaml:"reason,omitempty"` // may be anybody's: nothing is decided by it
	Text   string      `yaml:"text"`
	Since  time.Time   `yaml:"since,omitempty"` // zero: it isn't known
}

// Faults are those of the Node first.
type Faults []Fault

// String has the texts, each once.
func (all Faults) String() string {
	return strings.Join(slices.Compact(lists.Of(all, func(f Fault) string { return f.Text })), "; ")
}

// NodeHealth is how Kubernetes sees this node, and the node's own system pods here. Whoever has the credentials of the
// kubelet, or may write statuses, can make it better or worse: that delays what waits for it, or ends it as not
// healthy. It starts nothing.
type NodeHealth struct {
	Serves       string `yaml:"serves" column:"SERVES"`           // whether Kubernetes serves here: yes, no, or Unknown
	Unregistered bool   `yaml:"unregistered,omitempty"`           // an API server says that there is no Node
	Faults       Faults `yaml:"faults,omitempty" column:"FAULTS"` // none: it serves
}

// NodeHealths has one, HealthID.
var NodeHealths = resource.Define[NodeHealth](resource.Definition{Type: "NodeHealths.kubernetes.garboard.dev", Kind: "NodeHealth", Namespace: "kubernetes"})

// Health is how Kubernetes sees this node, as far as is known; of one without a configuration nothing is expected.
func Health(r resource.Reader) NodeHealth {
	h, err := NodeHealths.Get(r, HealthID)
	if _, none := configuration.Config(r); none == nil && err != nil {
		return unanswered(time.Time{}, errors.New("none was asked yet"))
	}
	return h.Spec
}

// systems are the DaemonSets of kube-system of which each node has a pod, and whether this one must have it: only
// control planes know from their configuration what a cluster has.
func systems(c *config.Config) map[string]bool {
	k, control := c.Cluster, c.Machine.Type.ControlPlane()
	return map[string]bool{"kube-flannel": control && k.Network.CNI.Name == config.CNIFlannel, "kube-network-policies": control && k.Network.Policies, "kube-proxy": control && !k.Proxy.Disabled}
}

// unanswered is the health while no API server answers: anything may be wrong.
func unanswered(since time.Time, why error) NodeHealth {
	text := config.Shorten(fmt.Sprintf("no API server says how this node is: %v", why), maxFault)
	objects := append([]string{NodeObject}, slices.Sorted(maps.Keys(systems(&config.Config{})))...)
	return NodeHealth{Serves: Unknown, Faults: lists.Of(objects, func(object string) Fault { return Fault{object, NoAnswer, text, since} })}
}

// healthController looks at the Node and the pods, as the kubelet.
type healthController struct {
	clientFile string
	sinceBoot  func() time.Duration
	transport  http.RoundTripper // of tests

	client   kubeclient.Kept
	answered time.Time // when an API server last did; zero: not since PID 1 runs
	pause    time.Duration
}

// HealthController publishes how Kubernetes sees the node.
func HealthController(sinceBoot func() time.Duration) resource.Controller {
	return resource.Controller{
		Name: "k8s.NodeHealthController", Reconcile: (&healthController{clientFile: clientFile, sinceBoot: sinceBoot}).reconcile, Leisurely: true,
		Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: network.Hostnames.Type(), ID: network.HostnameID}},
		Outputs: []string{NodeHealths.Type()},
	}
}

func (c *healthController) reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := configuration.Config(v)
	hostname, none := network.Hostnames.Get(v, network.HostnameID)
	if err = cmp.Or(err, none); err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	before, never := NodeHealths.Get(v, HealthID)
	now, err := c.look(ctx, cfg, hostname.Spec)
	switch {
	case err == nil:
		c.answered, c.pause = time.Now(), map[bool]time.Duration{true: healthLater, false: healthSoon}[len(now.Faults) == 0]
	case never == nil && len(before.Spec.Faults) == 0 && time.Since(c.answered) < silence:
		return healthSoon, nil
	default:
		now, c.pause = unanswered(c.answered, err), sleep.Longer(c.pause, healthSoon, healthLater)
	}
	// Why there is no answer isn't always said in the same words.
	if now.Serves != before.Spec.Serves || now.Serves != Unknown && now.Faults.String() != before.Spec.Faults.String() {
		v.Log().Info(strings.TrimSuffix(fmt.Sprintf("Kubernetes serves on this node: %s: %s", now.Serves, now.Faults), ": "))
	}
	return c.pause, NodeHealths.Put(v, HealthID, now)
}

// look asks an API server. An error is that there is no answer.
func (c *healthController) look(ctx context.Context, cfg *config.Config, name string) (h NodeHealth, err error) {
	if !untrusted.Exists(c.clientFile) {
		return h, errors.New("the node hasn't joined")
	}
	how := balancer.Client(cfg, c.clientFile)
	how.Transport = c.transport
	if err := c.client.Use(how); err != nil {
		return h, err
	}
	pods, err := c.client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: "kube-system"}, kubeclient.Selection{Fields: "spec.nodeName=" + name})
	node, none := c.client.Get(ctx, kubeclient.NodeRef(name))
	// Another server than an API server may not have it, either.
	if status, ok := errors.AsType[*kubeclient.StatusError](none); ok && status.Reason == "NotFound" {
		return NodeHealth{"no", true, Faults{{Object: NodeObject, Code: NoNode, Text: "Kubernetes has no Node " + name}}}, nil
	}
	if err = cmp.Or(err, none); err != nil {
		c.client.Close() // the kubelet may have another certificate
		return h, err
	}
	boot := time.Time{}
	if since := c.sinceBoot(); since < settled {
		boot = time.Now().Add(-since).Truncate(time.Second)
	}
	h.Faults = append(ofNode(node, boot), ofPods(pods.Items(), systems(cfg), boot)...)
	h.Serves = map[bool]string{true: "yes", false: "no"}[len(h.Faults) == 0]
	return h, nil
}

func ofNode(node kubeclient.Object, boot time.Time) Faults {
	ready := node.ConditionOf("Ready")
	switch {
	case ready == nil || ready.Time("lastHeartbeatTime").Before(boot):
		return Faults{{Object: NodeObject, Code: FormerBoot, Text: "Node: its kubelet hasn't reported since the boot"}}
	case ready.Text("status") == "True":
		return nil
	}
	word := cmp.Or(map[string]string{"False": "NotReady"}[ready.Text("status")], "Unknown")
	text := config.Shorten(fmt.Sprintf("Node is %s: %s", word, cmp.Or(ready.Text("message"), ready.Text("reason"))), maxFault)
	return Faults{{NodeObject, reason.Code(config.Shorten(ready.Text("reason"), maxFault)), text, ready.Time("lastTransitionTime")}}
}

// ofPods are the faults of the pods of systems, without those that end: others follow. Systems that are there are taken
// out of the wanted ones.
func ofPods(pods []kubeclient.Object, systems map[string]bool, boot time.Time) (faults Faults) {
	for _, pod := range pods {
		owner := append(pod.List("metadata", "ownerReferences"), nil)[0]
		name := owner.Text("name")
		if _, own := systems[name]; !own || owner.Text("kind") != "DaemonSet" || pod.Text("metadata", "deletionTimestamp") != "" {
			continue
		}
		systems[name] = false // it is there
		if code := config.Shorten(failing(pod, boot), maxFault); code != "" {
			faults = append(faults, Fault{name, reason.Code(code), fmt.Sprintf("pod kube-system/%s: %s", pod.Name(), code), pod.ConditionOf("Ready").Time("lastTransitionTime")})
		}
	}
	return append(faults, lists.Some(slices.Sorted(maps.Keys(systems)), func(name string) (Fault, bool) {
		return Fault{Object: name, Code: NoPod, Text: "no pod of kube-system/" + name + " is on this node"}, systems[name]
	})...)
}

// failing is why a pod isn't ready, in a word; "": it is.
func failing(pod kubeclient.Object, boot time.Time) string {
	ready := pod.Condition("Ready")
	for _, c := range slices.Concat(pod.List("status", "initContainerStatuses"), pod.List("status", "containerStatuses")) {
		why, began := cmp.Or(c.Text("state", "waiting", "reason"), c.Text("state", "terminated", "reason")), c.Time("state", "running", "startedAt")
		switch {
		case ready && !began.IsZero() && began.Before(boot):
			return string(FormerBoot)
		case !ready && why != "" && why != "Completed":
			return why
		}
	}
	return map[bool]string{false: cmp.Or(pod.Text("status", "reason"), "NotReady")}[ready]
}

const (
	// nodeLook is how often it is looked whether Kubernetes has the Node (NodeHealths).
	nodeLook = 10 * time.Second
	// registerFirst is the time from then on until a Node that was deleted is registered again: for a person who sees
	// that it was the wrong one, or who is about to reset this one. A person may do so again. What deletes a Node more
	// than registerOften times in a row, each within registerSteady, is a program, and neither gives in: then each
	// further time is twice as long, until it is registerMax.
	registerFirst  = time.Minute
	registerMax    = 16 * time.Minute
	registerSteady = 2 * time.Minute
	registerOften  = 3
)

// NodeDeleted is the reason of a kubelet whose Node was deleted.
const NodeDeleted reason.Code = "NodeDeleted"

// registration is whether Kubernetes has the Node. A kubelet registers only at its start.
type registration struct {
	again atomic.Pointer[time.Time] // when it starts anew, because the Node was deleted; nil: it wasn't
	often int                       // how many times in a row it was deleted within registerSteady
	since time.Time                 // the Node is there; zero: no run has seen it yet
}

// watch returns an error when the kubelet has to start anew. A Node that no run has registered yet isn't one that was
// deleted.
func (r *registration) watch(ctx context.Context, store resource.Reader) error {
	defer r.again.Store(nil)
	if !r.since.IsZero() {
		r.since = time.Now()
	}
	for sleep.For(ctx, nodeLook) {
		health := Health(store)
		at := r.again.Load()
		switch {
		case health.Serves == Unknown || health.Unregistered && r.since.IsZero(): // it may be there
		case !health.Unregistered:
			if r.since.IsZero() || at != nil {
				r.since = time.Now()
			}
			r.again.Store(nil)
		case at == nil:
			if r.often++; time.Since(r.since) > registerSteady {
				r.often = 1
			}
			pause := min(registerFirst<<min(max(r.often-registerOften, 0), registerOften+1), registerMax)
			r.again.Store(new(time.Now().Add(pause)))
		case !time.Now().Before(*at):
			return reason.With(NodeDeleted, errors.New("the Node was deleted from Kubernetes: the kubelet starts anew, and registers it"))
		}
	}
	return nil
}

// healthy is an error while the Node is to be registered again.
func (r *registration) healthy() error {
	at := r.again.Load()
	if at == nil {
		return nil
	}
	return reason.With(NodeDeleted, fmt.Errorf("the Node was deleted from Kubernetes; the kubelet registers it again in %s. If the machine is to go: gbctl reset", time.Until(*at).Round(time.Second)))
}

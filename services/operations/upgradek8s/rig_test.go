package upgradek8s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	nodes "github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/operationtest"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// rig is a cluster of three control planes and a worker, as the operation sees it: what
// peers and Kubernetes answer. What the programs do is in the tests on real parts.
type rig struct {
	rollout.Peers // what isn't there below isn't called

	operationtest.Node

	// what follows is guarded by Mu
	nodes   []*member
	pulled  []string      // node and image
	proxy   string        // the image of the DaemonSet
	lacking string        // an image that no registry has
	dies    string        // an image whose program ends after
	after   time.Duration // it was ready
	unready time.Duration // how long each program isn't ready, some seconds after it was
	metrics string
	before  map[string][]nodes.Fault // by node: of Kubernetes, all the time
	breaks  map[string]bool          // nodes whose kube-proxy doesn't run with the new kubelet
	falls   map[string]string        // nodes that aren't Ready any more, and after which change
	// nodes whose containerd is stopped, which Kubernetes doesn't notice yet, and after which change
	stops map[string]string
}

// member is a node.
type member struct {
	name     string
	address  netip.Addr
	document []byte
	version  uint64               // of the configuration
	changed  map[string]time.Time // when a component got its image
	versions map[string]uint64    // of the configurations of the programs
}

const (
	older = "v1.36.3"
	newer = "v1.37.2"
)

func newRig(t *testing.T) *rig {
	r := &rig{Node: operationtest.Node{T: t, Dir: t.TempDir()}, proxy: "registry.k8s.io/kube-proxy:" + older}
	for i, name := range []string{"n1", "n2", "n3", "w1"} {
		m := &member{
			name: name, address: netip.AddrFrom4([4]byte{10, 5, 0, byte(i + 2)}), version: 1,
			changed: map[string]time.Time{}, versions: map[string]uint64{},
		}
		m.document = fmt.Appendf(nil, `# kept
machine: {kubelet: {image: "ghcr.io/garboard-os/kubelet:%[1]s"}}
cluster:
  apiServer: {image: "registry.k8s.io/kube-apiserver:%[1]s"}
  controllerManager: {image: "mirror.example/kube-controller-manager:%[1]s"}
  scheduler: {image: "registry.k8s.io/kube-scheduler:%[1]s"}
  proxy: {image: "registry.k8s.io/kube-proxy:%[1]s"}
`, older)
		for _, c := range programs {
			m.versions[c.name] = 1
		}
		r.nodes = append(r.nodes, m)
	}
	return r
}

// boot is a start of the node that runs the operation.
func (r *rig) boot() {
	r.T.Helper()
	store := resource.NewStore()
	r.Boot(store, Definition(Options{
		Store: store, Peers: r, Kubernetes: operationtest.Kubernetes(r),
		Metrics: func(context.Context, netip.Addr) (string, error) { return r.metrics, nil },
	}))
}

func (r *rig) start(a *apiv1.UpgradeKubernetesRequest) (operation.Operation, error) {
	return r.Start(Name, a)
}

// run starts the operation and follows it to its end, over power cuts.
func (r *rig) run(a *apiv1.UpgradeKubernetesRequest) operation.Operation {
	r.T.Helper()
	o, err := r.start(a)
	operationtest.Put(r.T, err)
	return r.end(o.ID)
}

func (r *rig) end(id string) operation.Operation {
	r.T.Helper()
	return r.End(id, r.boot, func(string) string { return "" })
}

func (r *rig) at(a netip.Addr) (*member, error) {
	for _, m := range r.nodes {
		if m.address == a {
			return m, nil
		}
	}
	return nil, fmt.Errorf("no node %s", a)
}

func (r *rig) images(m *member) map[string]string {
	document, err := rollout.ParseConfig(m.document)
	if err != nil {
		panic(err)
	}
	return imagesOf(document)
}

func (r *rig) Check() error { return r.Restart.Check() }

func (r *rig) Config(_ context.Context, a netip.Addr) (*apiv1.GetConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	return &apiv1.GetConfigResponse{Document: slices.Clone(m.document), Digest: strconv.FormatUint(m.version, 10)}, nil
}

func (r *rig) Patch(_ context.Context, a netip.Addr, base string, patch []byte) (*apiv1.ApplyConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	if base != strconv.FormatUint(m.version, 10) {
		return nil, connect.NewError(connect.CodeAborted, errors.New("the configuration has changed"))
	}
	before := r.images(m)
	if m.document, err = merge.Apply(m.document, patch); err != nil {
		return nil, err
	}
	m.version++
	for name, image := range r.images(m) {
		if image != before[name] {
			m.changed[name] = time.Now()
			m.versions[name]++
			v, _ := config.VersionOf(image)
			r.Note(m.name + " " + name + " " + v)
		}
	}
	return &apiv1.ApplyConfigResponse{}, nil
}

func (r *rig) Services(_ context.Context, a netip.Addr) ([]*apiv1.Service, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err == nil && slices.Contains(r.Did, r.stops[m.name]) {
		return []*apiv1.Service{{Id: "containerd", State: "Stopped"}}, nil
	}
	return []*apiv1.Service{{Id: "containerd", Up: true}, {Id: "etcd", Up: true}, {Id: "kubelet", Up: true}}, err
}

// start is how long a program takes until it is ready.
const startTime = 4 * time.Second

func (r *rig) Resources(_ context.Context, a netip.Addr, typ, id string) ([]*apiv1.Resource, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	if typ == nodes.NodeHealths.Type() {
		health := nodes.NodeHealth{Faults: slices.Clone(r.before[m.name])}
		if image := r.images(m)[kubelet.name]; r.breaks[m.name] && strings.HasSuffix(image, newer) {
			health.Faults = append(health.Faults, nodes.Fault{Object: "kube-proxy", Text: "pod kube-system/kube-proxy-x: CrashLoopBackOff"})
		}
		if slices.Contains(r.Did, r.falls[m.name]) {
			health.Faults = append(health.Faults, nodes.Fault{Object: nodes.NodeObject, Text: "Node is NotReady: no network"})
		}
		text, err := yaml.Marshal(health)
		return []*apiv1.Resource{{Id: nodes.HealthID, Spec: string(text)}}, err
	}
	if typ == controlplane.Configs.Type() {
		// The controllers of the node take over a new configuration a moment later.
		if changed := m.changed[id]; !changed.IsZero() && time.Since(changed) < startTime/4 {
			return []*apiv1.Resource{{Id: id, Version: m.versions[id] - 1, Spec: "image: former"}}, nil
		}
		return []*apiv1.Resource{{Id: id, Version: m.versions[id], Spec: "image: " + r.images(m)[id]}}, nil
	}
	var all []*apiv1.Resource
	for _, c := range programs {
		since := time.Since(m.changed[c.name])
		restarts, ready, waiting := 0, since > startTime, ""
		version := m.versions[c.name]
		if since < startTime/2 && !m.changed[c.name].IsZero() {
			version, ready = version-1, true // the pod of before
		}
		if r.images(m)[c.name] == r.dies {
			switch {
			case since > startTime+r.after+20*time.Second:
				restarts, ready, waiting = 3, false, "CrashLoopBackOff"
			case since > startTime+r.after:
				restarts = 1
			}
		}
		if begin := 2 * startTime; since > begin && since < begin+r.unready {
			ready = false
		}
		status := object{
			controlplane.ConfigVersion: fmt.Sprint(version),
			"conditions":               []object{{"type": "Ready", "status": map[bool]string{true: "True", false: "False"}[ready]}},
			"containerStatuses":        []object{{"restartCount": restarts, "state": object{"waiting": object{"reason": waiting}, "running": object{"startedAt": fmt.Sprint(m.changed[c.name], restarts)}}}},
		}
		text, err := yaml.Marshal(status)
		if err != nil {
			return nil, err
		}
		all = append(all, &apiv1.Resource{Id: "kube-system/" + c.name + "-" + m.name, Spec: string(text)})
	}
	return all, nil
}

type object = map[string]any

func (r *rig) Pull(_ context.Context, a netip.Addr, image string, kubernetes bool, report func(done, total uint64)) (string, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if image == r.lacking {
		return "", fmt.Errorf("pull %s: not found", image)
	}
	r.pulled = append(r.pulled, a.String()+" "+image)
	report(1, 2)
	return "sha256:0", nil
}

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	w := httptest.NewRecorder()
	r.answer(w, q)
	return w.Result(), nil
}

const discovery = `{"kind":"APIGroupDiscoveryList","items":[
	{"metadata":{},"versions":[{"version":"v1","resources":[
		{"resource":"pods","scope":"Namespaced","responseKind":{"kind":"Pod"}},{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]},
	{"metadata":{"name":"apps"},"versions":[{"version":"v1","resources":[{"resource":"daemonsets","scope":"Namespaced","responseKind":{"kind":"DaemonSet"}}]}]}]}`

func (r *rig) answer(w http.ResponseWriter, q *http.Request) {
	path, name, _ := strings.Cut(q.URL.Path, "/nodes")
	switch {
	case q.URL.Path == "/api" || q.URL.Path == "/apis":
		io.WriteString(w, discovery)
	case path == "/api/v1" && name == "":
		items := []object{}
		for _, m := range r.nodes {
			items = append(items, r.node(m))
		}
		json.NewEncoder(w).Encode(object{"items": items})
	case path == "/api/v1":
		i := slices.IndexFunc(r.nodes, func(m *member) bool { return "/"+m.name == name })
		if q.Method == http.MethodPatch {
			var patch object
			json.NewDecoder(q.Body).Decode(&patch)
			on, _ := patch["spec"].(object)["unschedulable"].(bool)
			r.Note(r.nodes[i].name + map[bool]string{true: " cordon", false: " uncordon"}[on])
			r.nodes[i].changed["cordon"] = map[bool]time.Time{true: time.Now()}[on]
		}
		json.NewEncoder(w).Encode(r.node(r.nodes[i]))
	case strings.HasSuffix(q.URL.Path, "/pods"):
		io.WriteString(w, `{"items":[]}`)
	case strings.HasSuffix(q.URL.Path, "/daemonsets/kube-proxy"):
		if q.Method == http.MethodPatch {
			var patch kubeclient.Object
			json.NewDecoder(q.Body).Decode(&patch)
			r.proxy = patch.List("spec", "template", "spec", "containers")[1].Text("image")
			v, _ := config.VersionOf(r.proxy)
			r.Note("daemonset " + v)
		}
		json.NewEncoder(w).Encode(object{"kind": "DaemonSet", "metadata": object{"name": "kube-proxy", "resourceVersion": "1"}, "spec": object{"template": object{"spec": object{
			"containers": []object{{"name": "other", "image": "own:1"}, {"name": "kube-proxy", "image": r.proxy}},
		}}}})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (r *rig) node(m *member) object {
	version, _ := config.VersionOf(r.images(m)["kubelet"])
	labels, annotations := object{}, object{}
	if m.name[0] == 'n' {
		labels[rollout.ControlPlaneLabel] = ""
	}
	cordoned := !m.changed["cordon"].IsZero()
	if cordoned {
		annotations["garboard.dev/cordoned-by"] = r.only()
	}
	return object{
		"metadata": object{"name": m.name, "labels": labels, "annotations": annotations},
		"spec":     object{"unschedulable": cordoned},
		"status": object{
			"nodeInfo": object{"kubeletVersion": version}, "conditions": []object{r.ready(m)},
			"addresses": []object{{"type": "InternalIP", "address": m.address}},
		},
	}
}

// ready is the condition of a Node. One that falls at "" isn't Ready from the beginning.
func (r *rig) ready(m *member) object {
	if change, falls := r.falls[m.name]; falls && (change == "" || slices.Contains(r.Did, change)) {
		return object{"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "no network"}
	}
	return object{"type": "Ready", "status": "True"}
}

// only is the ID of the operation that runs.
func (r *rig) only() string {
	all, _ := r.Runner.List()
	for _, o := range all {
		if o.Ended.IsZero() {
			return o.ID
		}
	}
	return ""
}

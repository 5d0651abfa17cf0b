package convertk8s

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
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/operationtest"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

type object = map[string]any

// rig is a self-hosted cluster of three control planes and a worker, as the operation sees
// it: what peers and Kubernetes answer. What the programs do is in the tests on real parts.
type rig struct {
	rollout.Peers // what isn't there below isn't called

	operationtest.Node
	key config.KeyPEM // cluster.serviceAccount.key of the node of the operation

	// what follows is guarded by Mu
	nodes   []*member
	sets    map[string]object
	secrets map[string]object
	pods    map[string]string // program/node → "self", "static"
	mark    bool
	gone    time.Time // since when pod-checkpointer is gone
	// unstarted: after a cut, nothing starts the self-hosted programs.
	unstarted, down bool
}

type member struct {
	name     string
	address  netip.Addr
	document []byte
	version  uint64
}

const image = "registry.example/"

var errDark = errors.New("connection refused")

func newRig(t *testing.T) *rig {
	r := &rig{Node: operationtest.Node{T: t, Dir: t.TempDir()}, sets: map[string]object{}, secrets: map[string]object{}, pods: map[string]string{}, mark: true}
	for i, name := range []string{"n1", "n2", "n3", "w1"} {
		r.nodes = append(r.nodes, &member{name: name, address: netip.AddrFrom4([4]byte{10, 5, 0, byte(i + 2)}), version: 1, document: []byte("# kept\ncluster:\n  scheduler: {image: \"own:1\"}\n")})
	}
	for _, c := range append([]program{{name: checkpointer}}, programs...) {
		r.sets[c.name] = object{
			"metadata": object{"name": c.name, "namespace": "kube-system", "resourceVersion": "1", "labels": object{"k8s-app": c.name}},
			"spec": object{"template": object{"spec": object{
				"containers": []any{object{"name": c.name, "image": image + c.name + ":v1", "command": []any{c.name, "--own-flag=x"}}},
			}}},
		}
		for _, m := range r.nodes[:3] {
			r.pods[c.name+"/"+m.name] = "self"
		}
	}
	r.secrets["kube-controller-manager"] = object{"data": object{serviceAccountKey: "a2V5"}}
	return r
}

// boot is a start of the node that runs the operation.
func (r *rig) boot() {
	r.T.Helper()
	store := resource.NewStore()
	cfg := &config.Config{}
	cfg.Machine.Type = config.ControlPlane
	cfg.Cluster.ServiceAccount.Key = r.key
	cfg.Cluster.APIServer.ExtraArgs = config.Args{"audit-log-path": {"/nowhere/a"}}
	operationtest.Put(r.T, configuration.Configs.Put(store.As("test"), configuration.ConfigID, cfg))
	operationtest.Put(r.T, network.Addresses.Put(store.As("test"), network.AddressID, network.NodeAddress{Primary: r.nodes[0].address}))
	r.Boot(store, Definition(Options{
		Store: store, Peers: r, Kubernetes: operationtest.Kubernetes(r),
		RemoveInitialized: func(context.Context) error {
			r.Mu.Lock()
			defer r.Mu.Unlock()
			if r.mark {
				r.mark = false
				r.Note("key")
			}
			return nil
		},
	}))
}

func (r *rig) start(a *apiv1.ConvertKubernetesRequest) (operation.Operation, error) {
	return r.Start(Name, a)
}

// run starts the operation and follows it to its end, over power cuts. answers are those to
// its questions.
func (r *rig) run(a *apiv1.ConvertKubernetesRequest, answers map[string]string) operation.Operation {
	r.T.Helper()
	o, err := r.start(a)
	operationtest.Put(r.T, err)
	return r.end(o.ID, answers)
}

func (r *rig) end(id string, answers map[string]string) operation.Operation {
	r.T.Helper()
	return r.End(id, func() {
		if r.unstarted {
			r.down, r.pods = true, map[string]string{}
		}
		r.boot()
	}, func(question string) string { return answers[question] })
}

// said are the lines about an operation, as its watchers get them.
func (r *rig) said(id string) (lines []string) {
	r.T.Helper()
	operationtest.Put(r.T, r.Runner.Watch(r.T.Context(), id, 0, func(u operation.Update) error {
		for _, e := range u.Events {
			lines = append(lines, e.Text)
		}
		return nil
	}))
	return lines
}

func (r *rig) at(a netip.Addr) *member {
	return r.nodes[slices.IndexFunc(r.nodes, func(m *member) bool { return m.address == a })]
}

func (r *rig) Check() error { return r.Restart.Check() }

func (r *rig) Version(context.Context, netip.Addr) (*apiv1.VersionResponse, error) {
	return &apiv1.VersionResponse{Version: boot.Version}, nil
}

func (r *rig) Config(_ context.Context, a netip.Addr) (*apiv1.GetConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m := r.at(a)
	document, err := config.Redact(m.document) // a peer is no administrator
	return &apiv1.GetConfigResponse{Document: document, Digest: strconv.FormatUint(m.version, 10)}, err
}

func (r *rig) Patch(_ context.Context, a netip.Addr, base string, patch []byte) (*apiv1.ApplyConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m := r.at(a)
	if r.Cut == operationtest.Dark {
		return nil, errDark
	}
	if base != strconv.FormatUint(m.version, 10) {
		return nil, connect.NewError(connect.CodeAborted, errors.New("the configuration has changed"))
	}
	document, err := merge.Apply(m.document, patch)
	if err != nil {
		return nil, err
	}
	if string(document) != string(m.document) {
		m.document = document
		m.version++
		config, _ := rollout.ParseConfig(document)
		b := read(config)
		r.Note(m.name + map[bool]string{true: " complete", false: " old"}[len(b.Lacks) == 0])
	}
	return &apiv1.ApplyConfigResponse{}, nil
}

func (r *rig) Resources(_ context.Context, a netip.Addr, typ, id string) (all []*apiv1.Resource, err error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m := r.at(a)
	if r.Cut == operationtest.Dark {
		return nil, errDark
	}
	config, err := rollout.ParseConfig(m.document)
	if err != nil {
		return nil, err
	}
	b := read(config)
	switch typ {
	case controlplane.BootstrapStatuses.Type():
		return []*apiv1.Resource{{Id: "control-plane", Spec: fmt.Sprintf("selfHosted: %v", r.mark)}}, nil
	case controlplane.Configs.Type():
		return []*apiv1.Resource{{Id: id, Version: 1}}, nil
	case kubelet.NodeHealths.Type():
		return []*apiv1.Resource{{Id: kubelet.HealthID}}, nil
	case controlplane.StaticPods.Type(), controlplane.BootstrapManifests.Type():
		for range programs {
			if len(b.Lacks) == 0 {
				all = append(all, &apiv1.Resource{})
			}
		}
		return all, nil
	}
	for _, c := range programs {
		// The node writes the static pod when the port is free.
		if key := c.name + "/" + m.name; r.pods[key] == "" && len(b.Lacks) == 0 && !r.mark {
			r.pods[key] = "static"
			r.Note(key + " static")
		}
		if r.pods[c.name+"/"+m.name] != "static" {
			continue
		}
		text, err := yaml.Marshal(object{
			controlplane.ConfigVersion: "1", "conditions": []object{{"type": "Ready", "status": "True"}},
			"containerStatuses": []object{{"restartCount": 3, "state": object{"running": object{"startedAt": "1"}}}},
		})
		if err != nil {
			return nil, err
		}
		all = append(all, &apiv1.Resource{Id: "kube-system/" + c.name + "-" + m.name, Spec: string(text)})
	}
	return all, nil
}

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if r.Cut == operationtest.Dark || r.down && r.mark {
		return nil, errDark
	}
	w := httptest.NewRecorder()
	r.answer(w, q)
	return w.Result(), nil
}

const discovery = `{"kind":"APIGroupDiscoveryList","items":[
	{"metadata":{},"versions":[{"version":"v1","resources":[
		{"resource":"pods","scope":"Namespaced","responseKind":{"kind":"Pod"}},{"resource":"secrets","scope":"Namespaced","responseKind":{"kind":"Secret"}},
		{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]},
	{"metadata":{"name":"apps"},"versions":[{"version":"v1","resources":[{"resource":"daemonsets","scope":"Namespaced","responseKind":{"kind":"DaemonSet"}}]}]},
	{"metadata":{"name":"apiregistration.k8s.io"},"versions":[{"version":"v1","resources":[{"resource":"apiservices","scope":"Cluster","responseKind":{"kind":"APIService"}}]}]}]}`

// apiServices are one of the API server's own, and an aggregated one.
const apiServices = `{"items":[{"metadata":{"name":"v1.apps"},"spec":{"group":"apps","version":"v1"}},
	{"metadata":{"name":"v1beta1.metrics.k8s.io"},"spec":{"group":"metrics.k8s.io","version":"v1beta1","service":{"name":"metrics-server","namespace":"kube-system"}}}]}`

// aggregated is what the operator is told about it.
const aggregated = "APIService v1beta1.metrics.k8s.io: restart the pods of Service kube-system/metrics-server if it isn't available after the conversion: the authority of aggregated APIs is new"

func (r *rig) answer(w http.ResponseWriter, q *http.Request) {
	_, kind, _ := strings.Cut(q.URL.Path, "/namespaces/kube-system/")
	kind, name, _ := strings.Cut(kind, "/")
	switch {
	case q.URL.Path == "/api" || q.URL.Path == "/apis":
		io.WriteString(w, discovery)
	case q.URL.Path == "/apis/apiregistration.k8s.io/v1/apiservices":
		io.WriteString(w, apiServices)
	case q.URL.Path == "/api/v1/nodes":
		items := []object{}
		for _, m := range r.nodes {
			labels := object{}
			if m.name[0] == 'n' {
				labels["node-role.kubernetes.io/control-plane"] = ""
			}
			items = append(items, object{"metadata": object{"name": m.name, "labels": labels}, "status": object{"addresses": []object{{"type": "InternalIP", "address": m.address}}}})
		}
		json.NewEncoder(w).Encode(object{"items": items})
	case kind == "pods":
		r.answerPods(w, q, name)
	case kind == "daemonsets":
		r.answerObject(w, q, r.sets, "daemonset "+name, name)
	case kind == "secrets":
		r.answerObject(w, q, r.secrets, "secret "+name, name)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (r *rig) answerObject(w http.ResponseWriter, q *http.Request, all map[string]object, what, name string) {
	if q.Method == http.MethodPost {
		var o kubeclient.Object
		json.NewDecoder(q.Body).Decode(&o)
		if all[o.Name()] == nil {
			all[o.Name()] = o
			r.Note("made " + o.Name())
		}
		name = o.Name()
	}
	o, there := all[name]
	switch {
	case !there:
		w.WriteHeader(http.StatusNotFound)
		return
	case q.Method == http.MethodDelete:
		delete(all, name)
		if name == checkpointer {
			r.gone = time.Now()
		}
		r.Note("no " + what)
	}
	json.NewEncoder(w).Encode(o)
}

// answerPods: the name of a pod is its program, and its node. The checkpoints go five
// minutes after pod-checkpointer.
func (r *rig) answerPods(w http.ResponseWriter, q *http.Request, name string) {
	if q.Method == http.MethodDelete {
		key := strings.Replace(name, ".", "/", 1)
		if r.pods[key] == "static" {
			r.T.Errorf("static pod %s was deleted", name)
		}
		if r.sets[strings.Split(key, "/")[0]] != nil {
			r.T.Errorf("pod %s was deleted before its daemonset", name)
		}
		delete(r.pods, key)
		r.Note("no pod " + name)
		json.NewEncoder(w).Encode(object{})
		return
	}
	items := []object{}
	for key, is := range r.pods {
		program, node, _ := strings.Cut(key, "/")
		meta := object{"name": program + "." + node, "namespace": "kube-system"}
		switch {
		case program == checkpointer:
			if !r.gone.IsZero() && time.Since(r.gone) > 5*time.Minute {
				continue
			}
			meta["annotations"] = object{controlplane.CheckpointOf: "x"}
		case is == "static":
			meta["annotations"] = object{mirror: "1"}
		}
		wanted := q.URL.Query()
		if l := wanted.Get("labelSelector"); l != "" && l != programLabel+"="+program {
			continue
		}
		if f := wanted.Get("fieldSelector"); f != "" && f != "spec.nodeName="+node {
			continue
		}
		items = append(items, object{"metadata": meta})
	}
	json.NewEncoder(w).Encode(object{"items": items})
}

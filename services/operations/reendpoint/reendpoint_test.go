package reendpoint

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
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/operationtest"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

type object = map[string]any

const (
	former = "https://10.5.0.2:6443"
	next   = "https://api.example.org:6443"
	// restartTime is how long an API server takes to run with other arguments.
	restartTime = 4 * time.Second
)

// rig is a cluster of two control planes and a worker, as the operation sees it.
type rig struct {
	rollout.Peers // what isn't there below isn't called

	operationtest.Node

	// what follows is guarded by Mu
	nodes    []*member
	accepted []string // issuers of tokens
	leads    bool     // the endpoint leads to API servers
	refuses  string   // the node that refuses its patch
}

type member struct {
	name     string
	address  netip.Addr
	endpoint string
	changed  time.Time
}

func (r *rig) at(a netip.Addr) *member {
	return r.nodes[slices.IndexFunc(r.nodes, func(m *member) bool { return m.address == a })]
}

func start(t *testing.T, do func(*rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{Node: operationtest.Node{T: t, Dir: t.TempDir()}, leads: true, accepted: []string{former}}
		for i, name := range []string{"w1", "n1", "n2"} {
			r.nodes = append(r.nodes, &member{name: name, address: netip.AddrFrom4([4]byte{10, 5, 0, byte(i + 2)}), endpoint: former})
		}
		r.Boot(resource.NewStore(), Definition(Options{Peers: r, Record: r.record, ServesAt: r.serves, Kubernetes: operationtest.Kubernetes(r)}))
		defer r.Off()
		do(r)
	})
}

// run starts the operation and waits for its end.
func (r *rig) run(endpoint string) (operation.Operation, error) {
	o, err := r.Start(Name, &apiv1.SetEndpointRequest{Endpoint: endpoint})
	if err != nil {
		return o, err
	}
	return r.End(o.ID, nil, nil), nil
}

func (r *rig) record(_ context.Context, endpoint string) error {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if !slices.Contains(r.accepted, endpoint) {
		r.accepted = append(r.accepted, endpoint)
		r.Did = append(r.Did, "accepted")
	}
	return nil
}

// serves: certificates have the name of an endpoint when a control plane has that.
func (r *rig) serves(_ context.Context, url, name string) error {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if named := slices.ContainsFunc(r.nodes, func(m *member) bool { return m.endpoint == url }); !r.leads || name != balancer.ServerName && !named {
		return errors.New("no such host")
	}
	return nil
}

func (*rig) Check() error { return nil }

func (*rig) Version(context.Context, netip.Addr) (*apiv1.VersionResponse, error) {
	return &apiv1.VersionResponse{Version: boot.Version}, nil
}

func (r *rig) Config(_ context.Context, a netip.Addr) (*apiv1.GetConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	text, err := yaml.Marshal(patch(r.at(a).endpoint))
	return &apiv1.GetConfigResponse{Document: text}, err
}

func (r *rig) Patch(_ context.Context, a netip.Addr, _ string, text []byte) (*apiv1.ApplyConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m := r.at(a)
	if m.name == r.refuses {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("refused"))
	}
	for _, other := range r.nodes {
		if time.Since(other.changed) < restartTime {
			r.T.Errorf("%s is changed while the API server of %s restarts", m.name, other.name)
		}
	}
	has, err := rollout.ParseConfig(text)
	operationtest.Put(r.T, err)
	m.endpoint, m.changed = has.Text("cluster", "controlPlane", "endpoint"), time.Now()
	r.Did = append(r.Did, m.name+" "+m.endpoint)
	return &apiv1.ApplyConfigResponse{}, nil
}

// Resources: the static pod has the issuers at once, and the API server restarts.
func (r *rig) Resources(_ context.Context, a netip.Addr, typ, _ string) ([]*apiv1.Resource, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m := r.at(a)
	ready := "True"
	if time.Since(m.changed) < restartTime {
		ready = "False"
	}
	id, spec := program, any(object{"image": "i:1"})
	switch typ {
	case kubelet.NodeHealths.Type():
		id, spec = kubelet.HealthID, kubelet.NodeHealth{}
	case controlplane.StaticPods.Type():
		args := []string{"--" + issuerFlag + "=" + m.endpoint}
		for _, other := range r.accepted {
			if other != m.endpoint {
				args = append(args, "--"+issuerFlag+"="+other)
			}
		}
		spec = object{"command": args}
	case controlplane.StaticPodStatuses.Type():
		id, spec = "kube-system/"+program+"-"+m.name, object{controlplane.ConfigVersion: "1", "conditions": []object{{"type": "Ready", "status": ready}}}
	}
	text, err := yaml.Marshal(spec)
	return []*apiv1.Resource{{Id: id, Version: 1, Spec: string(text)}}, err
}

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	if q.URL.Path != "/api/v1/nodes" {
		io.WriteString(w, `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`)
		return w.Result(), nil
	}
	var items []object
	for _, m := range r.nodes {
		labels := object{}
		if m.name[0] == 'n' {
			labels[rollout.ControlPlaneLabel] = ""
		}
		items = append(items, object{"metadata": object{"name": m.name, "labels": labels}, "status": object{
			"addresses": []object{{"type": "InternalIP", "address": m.address}}, "conditions": []object{{"type": "Ready", "status": "True"}}}})
	}
	operationtest.Put(r.T, json.NewEncoder(w).Encode(object{"items": items}))
	return w.Result(), nil
}

// All accept the new endpoint before one has it, the control planes come first, and one after another.
func TestAllNodesGetTheEndpoint(t *testing.T) {
	t.Parallel()
	start(t, func(r *rig) {
		if o, err := r.run(next); err != nil || o.State != operation.Done {
			t.Fatalf("it ended as %s: %s, %v", o.State, o.Error, err)
		}
		if want := []string{"accepted", "n1 " + next, "n2 " + next, "w1 " + next}; !slices.Equal(r.Did, want) {
			t.Errorf("it did %q, not %q", r.Did, want)
		}
	})
}

// A node that refuses it: the others get theirs back, the last first.
func TestEndpointIsTakenBack(t *testing.T) {
	t.Parallel()
	start(t, func(r *rig) {
		r.refuses = "w1"
		o, err := r.run(next)
		if err != nil || o.State != operation.Failed || !strings.Contains(o.Error, "refused") {
			t.Fatalf("it ended as %s: %s, %v", o.State, o.Error, err)
		}
		if want := []string{"accepted", "n1 " + next, "n2 " + next, "n2 " + former, "n1 " + former}; !slices.Equal(r.Did, want) {
			t.Errorf("it did %q, not %q", r.Did, want)
		}
	})
}

// What isn't the cluster's endpoint changes nothing.
func TestEndpointLeadsNowhere(t *testing.T) {
	t.Parallel()
	start(t, func(r *rig) {
		for endpoint, want := range map[string]string{next: "leads to no API server of this cluster", "api.example.org": "not an absolute URL"} {
			r.leads = false
			if o, err := r.run(endpoint); err == nil || !strings.Contains(err.Error(), want) || len(r.Did) > 0 {
				t.Errorf("%s: it ended as %s, %v, and did %q", endpoint, o.State, fmt.Sprint(err), r.Did)
			}
		}
	})
}

package services

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/system/configuration"
	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
)

// recording is a file with answers of the node's API. The tests of gbctl, which may not
// import this room, serve it, so that they have the node's names.
const recording = "../tools/gbctl/testdata/node.json"

// recordedCalls are the requests that gbctl's tests make, in the order in which they are
// made here.
var recordedCalls = []struct{ procedure, request string }{
	{"ResourceService/Definitions", `{}`},
	{"ResourceService/Graph", `{}`},
	{"ResourceService/Graph", `{"services":true}`},
	{"ResourceService/List", `{"type":"staticpodstatus"}`},
	{"ResourceService/List", `{"type":"StaticPodStatuses.kubernetes.garboard.dev"}`},
	{"ResourceService/List", `{"type":"staticpods"}`},
	{"ResourceService/List", `{"type":"staticpods","id":"kube-apiserver"}`},
	{"ResourceService/List", `{"type":"staticpods","id":"nothing"}`},
	{"ResourceService/List", `{"type":"statics"}`},
	{"ResourceService/List", `{"type":"statcpods"}`},
	{"ResourceService/List", `{"type":"staticpods","id":"kube-apisever"}`},
	{"ResourceService/List", `{"type":"bs"}`},
	{"ResourceService/List", `{"type":"boots"}`},
	{"LogService/List", `{}`},
	{"ServiceService/List", `{}`},
	{"ServiceService/List", `{"id":"kubelet","events":20}`},
	{"ServiceService/List", `{"id":"etcd","events":20}`},
	{"ServiceService/List", `{"id":"nothing","events":20}`},
	{"ServiceService/List", `{"id":"kubelt","events":20}`},
	{"ServiceService/Control", `{"id":"kubelt","action":"ACTION_RESTART"}`},
	{"ServiceService/Control", `{"id":"kubelet","action":"ACTION_RESTART"}`},
	{"OperationService/UpgradeSystem", `{"drainTimeout":"300s","stage":true,"wipe":true}`},
	{"OperationService/UpgradeSystem", `{"force":true,"drainTimeout":"300s","wipe":true}`},
}

// recorded is the content of the file.
type recorded struct {
	// Calls has the answers of a control plane by procedure and request.
	Calls map[string]json.RawMessage `json:"calls"`
	// Operations has the steps of the operations that gbctl starts on nodes.
	Operations map[string]json.RawMessage `json:"operations"`
}

// calm is the graph of a node, with services that do nothing: the kubelet's first health
// check fails, and etcd ends twice, and then doesn't come up.
func calm(n *Node, since func() time.Duration) (*dag.Graph, error) {
	var all []dag.Service
	for i, status := range n.graph.Statuses() {
		ended, checks := 0, 0
		s := dag.Service{ID: status.ID, Kind: status.Kind, DependsOn: status.DependsOn}
		s.Prepare = func(context.Context, *dag.Handle) error {
			time.Sleep(time.Duration(i+1) * 100 * time.Millisecond) // one order of events
			return nil
		}
		s.Run = func(ctx context.Context, h *dag.Handle) error {
			switch {
			case s.ID == etcd.ID && ended < 2:
				ended++
				return errors.New("no data")
			case s.ID == kubelet.ID:
				h.Started("Started task kubelet (PID 2334) for container kubelet")
			case s.ID != etcd.ID:
				h.Started("Started")
			}
			<-ctx.Done()
			return nil
		}
		if s.ID == kubelet.ID {
			s.Health = &dag.Health{Check: func(context.Context) error {
				if checks++; checks > 1 {
					return nil
				}
				return errors.New(`Get "http://127.0.0.1:10248/healthz": dial tcp 127.0.0.1:10248: connect: connection refused`)
			}}
		}
		all = append(all, s)
	}
	return dag.New(dag.Options{SinceBoot: since}, all...)
}

// resources puts what the requests are about into the store, as the node's controllers do.
func resources(t *testing.T, store *resource.Store) {
	t.Helper()
	w := store.As("test")
	pod := kubeclient.Object{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "kube-apiserver"}, "spec": map[string]any{"priority": 2000000000}}
	ready := func(is string) controlplane.PodStatus {
		return controlplane.PodStatus{"conditions": []any{map[string]any{"type": "Ready", "status": is}}}
	}
	if err := errors.Join(
		configuration.Stages.Put(store.As(configuration.ID), configuration.StageID, configuration.Configured),
		configuration.Boots.Put(store.As(configuration.ID), "000001", configuration.Boot{Began: time.Now(), Release: "v1.0.0", Slot: "A", Exit: "reboot: asked by admin"}),
		controlplane.BootstrapStatuses.Put(w, "control-plane", controlplane.BootstrapStatus{}),
		controlplane.StaticPods.Put(w, "kube-apiserver", pod),
		controlplane.StaticPods.AddFinalizer(w, "kube-apiserver", `k8s.StaticPodStatus("kube-apiserver")`),
		controlplane.StaticPodStatuses.Put(w, "kube-system/kube-apiserver-cp-1", ready("True")),
		controlplane.StaticPodStatuses.Put(w, "kube-system/kube-scheduler-cp-1", ready("False")),
	); err != nil {
		t.Fatal(err)
	}
}

// record makes the calls to the API of a node.
func record(t *testing.T) map[string]json.RawMessage {
	t.Helper()
	answers := map[string]json.RawMessage{}
	synctest.Test(t, func(t *testing.T) {
		n, began := testNode(t), time.Now()
		since := func() time.Duration { return time.Since(began) }
		resources(t, n.Store)
		graph, err := calm(n, since)
		if err != nil {
			t.Fatal(err)
		}
		server, err := api.New(api.Options{
			Mode: boot.Machine, Store: n.Store, Graph: graph, Runtime: n.runtime, Logs: n.logs, Since: since, Gate: sandbox.NewSocket(os.Getuid(), filepath.Join(t.TempDir(), "gate")),
			Config: configuration.NewApplier(configuration.ApplierOptions{Mode: boot.Machine, Store: n.Store, StateDir: t.TempDir()}),
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- graph.Run(ctx) }()
		time.Sleep(4 * time.Minute)
		synctest.Wait()
		for _, call := range recordedCalls {
			answers[call.procedure+" "+call.request] = ask(t, server, call.procedure, call.request)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return answers
}

// ask makes one call, in JSON. The answer may be an error.
func ask(t *testing.T, server http.Handler, procedure, request string) json.RawMessage {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/garboard.v1."+procedure, strings.NewReader(request))
	for name, value := range map[string]string{
		"Content-Type": "application/json", contract.HeaderPeer: "admin", contract.HeaderRoles: string(contract.Admin),
		contract.HeaderRemote: "10.5.0.1:40000", contract.HeaderMode: contract.ModeNormal,
	} {
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	server.ServeHTTP(w, r)
	return plain(t, w.Body.Bytes())
}

// numbers are those of events: they differ where two events have the same time.
var numbers = regexp.MustCompile(`"seq":"\d+",`)

// plain is JSON without what differs each time: blanks, and the numbers of events.
func plain(t *testing.T, text []byte) json.RawMessage {
	t.Helper()
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	out, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return numbers.ReplaceAll(out, nil)
}

// operations are the steps of reboot, shutdown, reset, and of those that change the system.
func operations(t *testing.T) map[string]json.RawMessage {
	t.Helper()
	all := map[string]json.RawMessage{}
	for _, d := range lifecycle.Definitions(lifecycle.Options{Store: resource.NewStore()}) {
		steps, err := d.Steps(operation.Request{Arguments: []byte("{}")})
		if err != nil {
			t.Fatal(err)
		}
		o := &apiv1.Operation{Name: d.Name}
		for _, s := range steps {
			if s.Omit {
				continue
			}
			o.Steps = append(o.Steps, &apiv1.OperationStep{Id: s.ID, What: s.What, Deadline: durationpb.New(s.Deadline), Optional: s.Optional})
		}
		text, err := protojson.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		all[d.Name] = plain(t, text)
	}
	return all
}

// What gbctl is tested against is what the API answers: the names of services, types,
// controllers, logs and steps, and its texts.
func TestGbctlIsTestedAgainstTheAPI(t *testing.T) {
	t.Parallel()
	got := recorded{Calls: record(t), Operations: operations(t)}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(got); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(recording, text.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(recording)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(text.String(), "\n")); diff != "" {
		t.Errorf("%s isn't what the API answers (go test ./services -run %s -update writes it; then look at the tests of gbctl):\n%s", recording, t.Name(), diff)
	}
}

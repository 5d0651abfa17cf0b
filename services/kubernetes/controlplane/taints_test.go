package controlplane

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// tainted is a cluster with the worker w: its Node, its record, and a control plane that keeps its taints.
type tainted struct {
	t       *testing.T
	node    kubeclient.Object
	record  roster.Record
	worker  *resource.Store
	view    view
	keeper  NodeLabelController
	patched int
}

func newTainted(t *testing.T) *tainted {
	c := &tainted{t: t, node: kubeclient.Object{
		"metadata": object{"name": "w", "uid": "u1", "resourceVersion": "1", "creationTimestamp": time.Now().Format(time.RFC3339), "annotations": object{}},
		"spec":     object{"taints": list{}},
	}}
	store := served(t, c)
	cfg, err := configuration.Config(store)
	put(t, err)
	c.view = view{store.As("test"), logs.New(testWriter{t}).Logger(controllerLog)}
	c.worker = resource.NewStore()
	c.certify(cfg.Machine.CA.CA())
	cert, err := secrets.API.Get(c.worker, secrets.APIID)
	put(t, err)
	leaf, err := pki.ParseCert(cert.Spec.Serving.Crt)
	put(t, err)
	c.record.Key, err = pki.KeyID(leaf.PublicKey)
	put(t, err)
	c.keeper = NodeLabelController{
		roster: func(context.Context) (roster.Facts, error) {
			return roster.Facts{Records: map[string]roster.Record{"w": c.record}, Nodes: map[string]bool{"w": true}, Now: time.Now()}, nil
		},
		enlist: func(_ context.Context, _ string, r roster.Record) error { c.record = r; return nil },
	}
	return c
}

// certify gives the worker another certificate of the machine API, with another key.
func (c *tainted) certify(ca pki.CA) {
	c.t.Helper()
	crt, key, err := ca.Issue(pki.Leaf{CN: "w", DNS: []string{"w"}, Server: true, Now: time.Now()})
	put(c.t, err)
	put(c.t, secrets.API.Put(c.worker.As("test"), secrets.APIID, secrets.APISpec{Serving: config.CertKey{Crt: crt, Key: key}}))
}

func (c *tainted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/api":
		fmt.Fprint(w, `{"items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`)
	case r.URL.Path == "/apis":
		fmt.Fprint(w, `{"items":[]}`)
	case r.Method == http.MethodPatch:
		var patch kubeclient.Object
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil || r.URL.Path != "/api/v1/nodes/w" || patch.ResourceVersion() != c.node.ResourceVersion() {
			c.t.Errorf("patch of %s: %v, %v", r.URL.Path, patch, err)
		}
		c.patched++
		c.node["spec"] = patch["spec"]
		_ = json.NewEncoder(w).Encode(c.node)
	default:
		other := kubeclient.Object{"metadata": object{"name": "other"}, "spec": object{"taints": list{object{"key": "a", "effect": "NoSchedule"}}}}
		_ = json.NewEncoder(w).Encode(object{"items": []any{other, c.node}})
	}
}

// asks has the worker ask for the taints of its configuration.
func (c *tainted) asks(taints map[string]config.Taint) {
	c.t.Helper()
	cfg := &config.Config{Machine: config.Machine{Type: config.Worker, Kubelet: config.Kubelet{NodeTaints: taints}}}
	asks, err := asksForTaints(c.worker, cfg, c.node)
	put(c.t, err)
	annotations := c.node.At("metadata", "annotations").(map[string]any)
	maps.Copy(annotations, asks)
	if again, err := asksForTaints(c.worker, cfg, c.node); len(again) > 0 || err != nil {
		c.t.Errorf("it asks again: %v, %v", again, err)
	}
}

// taint is what an administrator does: KEY=VALUE:EFFECT.
func (c *tainted) taint(texts ...string) {
	taints := list{}
	for _, text := range texts {
		key, rest, _ := strings.Cut(text, "=")
		value, effect, _ := strings.Cut(rest, ":")
		taint := object{"key": key, "effect": effect}
		if value != "" {
			taint["value"] = value
		}
		taints = append(taints, taint)
	}
	c.node["spec"] = object{"taints": taints}
}

// keeps has the control plane look, and compares the Node and its record.
func (c *tainted) keeps(what, node, record string) {
	c.t.Helper()
	client, err := AdminClient(c.view)
	put(c.t, err)
	defer client.Close()
	_, err = c.keeper.keepTaints(c.t.Context(), c.view, client)
	put(c.t, err)
	var have []string
	for _, t := range c.node.List("spec", "taints") {
		have = append(have, t.Text("key")+"="+t.Text("value")+":"+t.Text("effect"))
	}
	if diff := cmp.Diff([]string{node, record}, []string{strings.Join(have, " "), strings.Join(c.record.Taints, " ")}); diff != "" {
		c.t.Errorf("%s: (-want +got)\n%s", what, diff)
	}
}

// leaves has the worker ask for the end of its Node: a taint of others is a reason against that.
func (c *tainted) leaves(want string) {
	c.t.Helper()
	proof, err := secrets.Prove(c.worker, kubeclient.LeavePurpose, []byte(c.node.Text("metadata", "uid")))
	put(c.t, err)
	c.node.At("metadata", "annotations").(map[string]any)[kubeclient.LeavingProof] = string(proof)
	if why := (&NodeLeaveController{roster: c.keeper.roster}).mayLeave(c.t.Context(), c.view, c.node); why != want {
		c.t.Errorf("it doesn't leave: %q, want %q", why, want)
	}
}

// Taints of a worker's configuration are kept, and those of others stay.
func TestTaintsOfWorkersAreKept(t *testing.T) {
	t.Parallel()
	c := newTainted(t)
	c.taint("theirs=:NoExecute", "dock=dry:NoSchedule")
	c.asks(nil)
	c.keeps("it asks for nothing", "theirs=:NoExecute dock=dry:NoSchedule", "")
	c.asks(map[string]config.Taint{"dock": {Value: "dry", Effect: "NoSchedule"}})
	c.keeps("as it registered", "theirs=:NoExecute dock=dry:NoSchedule", "dock=NoSchedule")
	if c.patched > 0 {
		t.Error("the Node was changed")
	}
	c.leaves(`it has the taint "theirs"`)
	c.taint("dock=dry:NoSchedule")
	c.leaves("")
	c.taint("theirs=:NoExecute")
	c.keeps("removed by hand", "theirs=:NoExecute dock=dry:NoSchedule", "dock=NoSchedule")
	c.asks(map[string]config.Taint{"dock": {Value: "wet", Effect: "NoSchedule"}, "gpu": {Effect: "NoExecute"}})
	c.keeps("another value", "theirs=:NoExecute dock=wet:NoSchedule gpu=:NoExecute", "dock=NoSchedule gpu=NoExecute")
	c.asks(map[string]config.Taint{"gpu": {Effect: "NoSchedule"}})
	c.keeps("another effect", "theirs=:NoExecute gpu=:NoSchedule", "dock=NoSchedule gpu=NoExecute gpu=NoSchedule")
	c.keeps("all is done", "theirs=:NoExecute gpu=:NoSchedule", "gpu=NoSchedule")
	c.taint("theirs=:NoExecute", "gpu=:NoSchedule", "dock=wet:NoSchedule")
	c.keeps("it is the administrator's now", "theirs=:NoExecute gpu=:NoSchedule dock=wet:NoSchedule", "gpu=NoSchedule")
	c.asks(nil)
	c.keeps("none is left", "theirs=:NoExecute dock=wet:NoSchedule", "gpu=NoSchedule")
	c.keeps("all is done", "theirs=:NoExecute dock=wet:NoSchedule", "")
}

// A worker that was taken over, and whoever may write to its Node, takes nothing away that others have put there.
func TestTaintsOfOthersStay(t *testing.T) {
	t.Parallel()
	c := newTainted(t)
	c.node["metadata"].(map[string]any)["creationTimestamp"] = time.Now().Add(-registers).Format(time.RFC3339)
	all := "quarantine=a:NoExecute node.kubernetes.io/unschedulable=:NoSchedule"
	c.taint("quarantine=a:NoExecute", "node.kubernetes.io/unschedulable=:NoSchedule")
	for _, value := range []string{"a", "b"} {
		c.asks(map[string]config.Taint{"quarantine": {Value: value, Effect: "NoExecute"}, "node.kubernetes.io/unschedulable": {Effect: "NoSchedule"}})
		c.keeps("it claims what is there", all, "")
		c.asks(nil)
		c.keeps("it doesn't any more", all, "")
	}
	c.asks(map[string]config.Taint{"node.kubernetes.io/not-ready": {Effect: "NoExecute"}, "gpu": {Effect: "NoSchedule"}})
	all += " gpu=:NoSchedule"
	c.keeps("it asks for one of Kubernetes'", all, "gpu=NoSchedule")

	annotations := c.node["metadata"].(map[string]any)["annotations"].(map[string]any)
	mine := maps.Clone(annotations)
	for what, attack := range map[string]func(){
		"by who may write to Nodes": func() { annotations[wantedAnnotation] = "{}" },
		"without a proof":           func() { annotations[wantedAnnotation], annotations[wantedProof] = "{}", "" },
		"for the Node of before":    func() { c.asks(nil); c.node["metadata"].(map[string]any)["uid"] = "u2" },
		"by a machine with another key": func() {
			cfg, err := configuration.Config(c.view)
			put(t, err)
			c.certify(cfg.Machine.CA.CA())
			c.asks(nil)
		},
		"by a stranger":            func() { c.certify(newMachineCA(t)); c.asks(nil) },
		"what isn't taints":        func() { annotations[wantedAnnotation] = `{"gpu": "Never"}` },
		"more than a node can use": func() { annotations[wantedAnnotation] = `{}` + strings.Repeat(" ", maxWanted) },
	} {
		own, err := secrets.API.Get(c.worker, secrets.APIID)
		put(t, err)
		attack()
		c.keeps(what, all, "gpu=NoSchedule")
		put(t, secrets.API.Put(c.worker.As("test"), secrets.APIID, own.Spec))
		c.node["metadata"].(map[string]any)["uid"] = "u1"
		maps.Copy(annotations, mine)
	}
	c.taint("quarantine=a:NoExecute", "node.kubernetes.io/unschedulable=:NoSchedule")
	c.keeps("the worker itself", all, "gpu=NoSchedule")
}

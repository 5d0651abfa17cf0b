package kubeclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// cluster is an API server with one node and its pods, in memory: no time passes
// between its questions and answers.
type cluster struct {
	node     Object
	pods     []Object
	budget   map[string]int // how often the eviction of a pod is refused; -1: always
	grace    time.Duration  // how long a pod takes to end
	changes  int            // conflicts to come
	silent   bool
	requests int
}

func (c *cluster) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.silent {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	w := httptest.NewRecorder()
	c.ServeHTTP(w, r)
	return w.Result(), nil
}

func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.requests++
	path := r.URL.Path
	switch {
	case path == "/api":
		io.WriteString(w, coreDiscovery)
	case path == "/apis":
		io.WriteString(w, groupDiscovery)
	case path == "/api/v1/nodes/n1" && r.Method == http.MethodGet:
		json.NewEncoder(w).Encode(c.node)
	case path == "/api/v1/nodes/n1":
		c.patch(w, r)
	case path == "/api/v1/pods":
		if got := r.URL.Query().Get("fieldSelector"); got != "spec.nodeName=n1" {
			status(w, 400, "BadRequest", "fieldSelector "+got)
			return
		}
		now := time.Now()
		c.pods = slices.DeleteFunc(c.pods, func(p Object) bool {
			at, err := time.Parse(time.RFC3339Nano, p.Text("metadata", "deletionTimestamp"))
			return err == nil && !now.Before(at)
		})
		items := make([]any, len(c.pods))
		for i, p := range c.pods {
			items[i] = p
		}
		json.NewEncoder(w).Encode(Object{"kind": "PodList", "items": items})
	default:
		c.pod(w, r)
	}
}

func (c *cluster) patch(w http.ResponseWriter, r *http.Request) {
	var p Object
	_ = json.NewDecoder(r.Body).Decode(&p)
	if c.changes--; c.changes >= 0 || p.ResourceVersion() != c.node.ResourceVersion() {
		status(w, 409, "Conflict", "the object has been modified")
		return
	}
	meta, spec := c.node["metadata"].(map[string]any), c.node["spec"].(map[string]any)
	annotations := p.At("metadata", "annotations").(map[string]any)
	if meta["annotations"] == nil {
		meta["annotations"] = map[string]any{}
	}
	set(meta["annotations"].(map[string]any), annotations)
	set(spec, p["spec"].(map[string]any))
	json.NewEncoder(w).Encode(c.node)
}

// set is a merge patch of a flat object.
func set(to, patch map[string]any) {
	for k, v := range patch {
		if to[k] = v; v == nil {
			delete(to, k)
		}
	}
}

func (c *cluster) pod(w http.ResponseWriter, r *http.Request) {
	name, evicted := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, "/api/v1/namespaces/ns/pods/"), "/eviction")
	at := slices.IndexFunc(c.pods, func(p Object) bool { return p.Name() == name })
	if at < 0 {
		status(w, 404, "NotFound", "pods not found")
		return
	}
	if !evicted {
		status(w, 403, "Forbidden", "a pod that has come meanwhile may have the name")
		return
	}
	var body Object
	_ = json.NewDecoder(r.Body).Decode(&body)
	if got := body.Text("deleteOptions", "preconditions", "uid"); got != c.pods[at].Text("metadata", "uid") {
		status(w, 409, "Conflict", "the UID in the precondition is "+got)
		return
	}
	if c.budget[name] != 0 {
		c.budget[name]--
		w.WriteHeader(429)
		fmt.Fprintf(w, `{"kind":"Status","reason":"TooManyRequests","message":"Cannot evict pod as it would violate the pod's disruption budget.",
			"details":{"causes":[{"reason":"DisruptionBudget","message":"The disruption budget keep-%s needs 1 healthy pods and has 1 currently"}]}}`, name)
		return
	}
	if c.pods[at].Text("status", "phase") == "Succeeded" {
		c.pods = slices.Delete(c.pods, at, at+1)
		io.WriteString(w, "{}")
		return
	}
	c.pods[at]["metadata"].(map[string]any)["deletionTimestamp"] = time.Now().Add(c.grace).Format(time.RFC3339Nano)
	io.WriteString(w, "{}")
}

func podOf(name, phase string, owner string) Object {
	p := Object{"metadata": map[string]any{"namespace": "ns", "name": name, "uid": "uid-" + name}, "status": map[string]any{"phase": phase}}
	if owner != "" {
		p["metadata"].(map[string]any)["ownerReferences"] = []any{map[string]any{"kind": owner, "controller": true}}
	}
	return p
}

func (c *cluster) client() *Client {
	return &Client{server: "https://n1", http: &http.Client{Transport: c}}
}

func newCluster(pods ...Object) *cluster {
	return &cluster{
		node: Object{"metadata": map[string]any{"name": "n1", "resourceVersion": "1"}, "spec": map[string]any{}},
		pods: pods, budget: map[string]int{}, grace: 3 * time.Second,
	}
}

func mirror(p Object) Object {
	p["metadata"].(map[string]any)["annotations"] = map[string]any{"kubernetes.io/config.mirror": "x"}
	return p
}

// S-181: pods that would come again stay, the rest is evicted within its grace, and what
// is kept for a while is tried again, without keeping others.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(podOf("web", "Running", "ReplicaSet"), podOf("slow", "Running", "StatefulSet"), podOf("done", "Succeeded", "Job"),
			podOf("net", "Running", "DaemonSet"), mirror(podOf("kube-apiserver", "Running", "Node")), podOf("alone", "Running", ""))
		c.budget["slow"], c.budget["done"] = 3, 2
		var reports []string
		start := time.Now()
		err := Drain{Client: c.client(), Node: "n1", Report: func(f string, a ...any) { reports = append(reports, fmt.Sprintf(f, a...)) }}.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, p := range c.pods {
			left = append(left, p.Name())
		}
		if want := []string{"net", "kube-apiserver"}; !slices.Equal(left, want) {
			t.Errorf("left are %v, want %v", left, want)
		}
		// Refused at 0, 1, 3 s; evicted at 7 s, gone at 10 s, seen by the look of that second.
		if took := time.Since(start); took != 10*time.Second {
			t.Errorf("it took %s", took)
		}
		if !strings.Contains(reports[0], "ns/done (Cannot evict") || !strings.Contains(reports[0], "ns/slow (Cannot evict pod as it would violate the pod's disruption budget. The disruption budget keep-slow needs 1 healthy pods and has 1 currently)") {
			t.Errorf("said %q", reports)
		}
		if len(reports) > 5 {
			t.Errorf("it repeats itself: %q", reports)
		}
	})
}

// The pods that nobody makes anew elsewhere are kept for a reboot.
func TestDrainKeepsWhatIsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(podOf("alone", "Running", ""), podOf("web", "Running", "ReplicaSet"))
		if err := (Drain{Client: c.client(), Node: "n1", Keep: true, Report: func(string, ...any) {}}).Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(c.pods) != 1 || c.pods[0].Name() != "alone" {
			t.Errorf("left are %v", c.pods)
		}
	})
}

// Duty 4: a budget that never gives way, and an API server that never answers, end
// with the deadline, and are named.
func TestDrainEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*cluster)
		want   []string
	}{
		"budget": {func(c *cluster) { c.budget["web"] = -1 }, []string{"drain node n1: left are ns/web (Cannot evict", "The disruption budget keep-web"}},
		"grace":  {func(c *cluster) { c.grace = time.Hour }, []string{"left are ns/web (is ending)"}},
		"silent": {func(c *cluster) { c.silent = true }, []string{"drain node n1: ", "context deadline exceeded"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(podOf("web", "Running", "ReplicaSet"))
				tt.change(c)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				start := time.Now()
				err := Drain{Client: c.client(), Node: "n1", Report: func(string, ...any) {}}.Run(ctx)
				var left *Left
				if !errors.As(err, &left) || time.Since(start) != time.Minute {
					t.Fatalf("%v after %s", err, time.Since(start))
				}
				for _, part := range tt.want {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("error %q, want %q in it", err, part)
					}
				}
				if c.requests > 150 {
					t.Errorf("%d requests in a minute", c.requests)
				}
			})
		})
	}
}

func TestCordon(t *testing.T) {
	ctx := t.Context()
	c := newCluster()
	c.changes = 2 // the kubelet is quicker twice
	did, err := c.client().Cordon(ctx, "n1", "reboot-1")
	if !did || err != nil || c.node.At("spec", "unschedulable") != true {
		t.Fatalf("%v, %v: %v", did, err, c.node)
	}
	if did, err := c.client().Cordon(ctx, "n1", "reboot-1"); !did || err != nil {
		t.Errorf("again: %v, %v", did, err)
	}
	if did, err := c.client().Uncordon(ctx, "n1", "reset-2"); did || err != nil || c.node.At("spec", "unschedulable") != true {
		t.Errorf("uncordoned by another: %v, %v: %v", did, err, c.node)
	}
	// One that comes after it, and finds the node so, takes that over.
	if did, err := c.client().Cordon(ctx, "n1", "reset-2"); !did || err != nil {
		t.Errorf("by the next: %v, %v", did, err)
	}
	if did, err := c.client().Uncordon(ctx, "n1", "reboot-1"); did || err != nil {
		t.Errorf("uncordoned by the former: %v, %v", did, err)
	}
	if did, err := c.client().Uncordon(ctx, "n1", "reset-2"); !did || err != nil || c.node.At("spec", "unschedulable") != nil {
		t.Errorf("uncordon: %v, %v: %v", did, err, c.node)
	}
	if did, err := c.client().Uncordon(ctx, "n1", "reset-2"); did || err != nil {
		t.Errorf("uncordon again: %v, %v", did, err)
	}
	// What a person has cordoned stays so.
	c.node["spec"].(map[string]any)["unschedulable"] = true
	if did, err := c.client().Cordon(ctx, "n1", "reboot-3"); did || err != nil {
		t.Errorf("cordoned before: %v, %v", did, err)
	}
	c.changes = 100
	if _, err := c.client().Uncordon(ctx, "n1", "reboot-3"); err != nil {
		t.Errorf("nothing to do: %v", err)
	}
	c.node["spec"] = map[string]any{}
	if _, err := c.client().Cordon(ctx, "n1", "reboot-3"); !IsConflict(err) {
		t.Errorf("a node that changes for ever: %v", err)
	}
}

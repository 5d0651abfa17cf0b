package kubelet

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

// apiServer answers with a Node and its lease; nil: it doesn't answer.
type apiServer struct{ node, lease map[string]any }

func (a *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	kind := func(group, version, kind, resource, scope string) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": group}, "versions": []any{map[string]any{"version": version, "resources": []any{
			map[string]any{"resource": resource, "scope": scope, "responseKind": map[string]any{"kind": kind}}}}}}
	}
	var body any
	switch r.URL.Path {
	case "/api":
		body = map[string]any{"items": []any{kind("", "v1", "Node", "nodes", "Cluster")}}
	case "/apis":
		body = map[string]any{"items": []any{kind("coordination.k8s.io", "v1", "Lease", "leases", "Namespaced")}}
	case "/api/v1/nodes/n1":
		body = a.node
	case "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1":
		body = a.lease
	}
	if a.node == nil {
		return nil, errors.New("connection refused")
	}
	text, err := json.Marshal(body)
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
}

// renewed is the lease of a kubelet that runs.
func renewed(after time.Duration) map[string]any {
	return map[string]any{"spec": map[string]any{"renewTime": time.Now().Add(after).UTC().Format("2006-01-02T15:04:05.000000Z07:00")}}
}

// A control plane leaves a name to the machine that has it while that one runs, and no longer.
func TestNameTaken(t *testing.T) {
	holder := func(id string) map[string]any {
		return map[string]any{"status": map[string]any{"nodeInfo": map[string]any{"machineID": id}, "addresses": []any{map[string]any{"type": "InternalIP", "address": "10.5.0.3"}}}}
	}
	for name, tc := range map[string]struct {
		id    string // of the Node; "-": no server answers
		lease time.Duration
		waits bool
	}{
		"another machine that runs":          {"other", -10 * time.Second, true},
		"another machine that registers":     {"other", 0, true},
		"another machine that is gone":       {"other", -leaseFresh - time.Second, false},
		"a lease that was renewed in future": {"other", time.Hour, false},
		"this machine":                       {"own", -10 * time.Second, false},
		"a Node of nobody":                   {"", -10 * time.Second, false},
		"no server":                          {"-", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := &apiServer{node: holder(tc.id), lease: renewed(tc.lease)}
				if tc.lease == 0 && tc.id == "other" { // it has no lease yet
					server.lease = nil
					server.node["metadata"] = map[string]any{"creationTimestamp": time.Now().UTC().Format(time.RFC3339)}
				}
				if tc.id == "-" {
					server.node = nil
				}
				client, err := kubeclient.New(kubeclient.Options{Server: "https://k", Transport: server})
				must(t, err)
				check := func() error { return nameTaken(t.Context(), client, "n1", "own") }
				err = check()
				if tc.waits != (err != nil) {
					t.Fatalf("got %v", err)
				}
				if tc.waits && (reason.Of(err) != roster.NameTaken || !strings.Contains(err.Error(), "the machine other has the name n1, at 10.5.0.3")) {
					t.Errorf("got %v", err)
				}
				time.Sleep(leaseFresh + time.Second)
				if err := check(); err != nil {
					t.Errorf("after the last machine has ended: %v", err)
				}
			})
		})
	}
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/components/podcheckpointer/checkpoint"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// node is a fake API server and container runtime.
type node struct {
	cri.RuntimeServiceClient
	objects map[string]string // what the API server answers, by path
	ready   []string          // NAMESPACE/NAME of the pods with a ready sandbox
	empty   bool              // the sandboxes have no containers
}

func (n *node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	text, found := n.objects[r.URL.Path]
	if !found {
		w.WriteHeader(http.StatusNotFound)
	}
	_, _ = w.Write([]byte(text))
}

func (n *node) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest, ...grpc.CallOption) (*cri.ListPodSandboxResponse, error) {
	answer := &cri.ListPodSandboxResponse{}
	for _, id := range n.ready {
		namespace, name, _ := strings.Cut(id, "/")
		answer.Items = append(answer.Items, &cri.PodSandbox{Id: id, Labels: map[string]string{"io.kubernetes.pod.namespace": namespace, "io.kubernetes.pod.name": name}})
	}
	return answer, nil
}

func (n *node) ListContainers(context.Context, *cri.ListContainersRequest, ...grpc.CallOption) (*cri.ListContainersResponse, error) {
	answer := &cri.ListContainersResponse{}
	for _, id := range n.ready {
		if !n.empty {
			answer.Containers = append(answer.Containers, &cri.Container{PodSandboxId: id})
		}
	}
	return answer, nil
}

// list is an answer with two parents, one of which is a pod of the pod-checkpointer, and another pod.
const list = `{"items": [
{"metadata": {"name": "self", "namespace": "s", "labels": {"k8s-app": "pod-checkpointer"}, "annotations": {"checkpointer.alpha.coreos.com/checkpoint": "true"}}, "spec": {}},
{"metadata": {"name": "app", "namespace": "s", "annotations": {"checkpointer.alpha.coreos.com/checkpoint": "true"}},
 "spec": {"volumes": [{"name": "a", "secret": {"secretName": "keys"}}, {"name": "b", "configMap": {"name": "settings"}}, {"name": "c", "secret": {"secretName": "none", "optional": true}}]}},
{"metadata": {"name": "other", "namespace": "s"}, "spec": {}}]}`

const kubeconfig = `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}],
clusters: [{name: k, cluster: {server: "%s"}}], users: [{name: u, user: {}}]}`

func TestLook(t *testing.T) {
	t.Parallel()
	n := &node{ready: []string{"s/self", "s/app"}, objects: map[string]string{
		"/api/v1/pods":                             list,
		"/api/v1/namespaces/s/secrets/keys":        `{"data": {"k": "djE="}}`,
		"/api/v1/namespaces/s/configmaps/settings": `{"data": {"t": "text"}, "binaryData": {"b": "djE="}}`,
	}}
	server := httptest.NewServer(n)
	defer server.Close()
	root, access := t.TempDir(), filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(access, fmt.Appendf(nil, kubeconfig, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &program{
		node: "n", errors: map[string]string{}, runtime: n, store: store{dir: root + "/dir", static: root + "/static"},
		kubeconfig: access, decider: checkpoint.Decider{},
	}
	always := []string{
		"dir/configmaps/s/app/settings/b=v1", "dir/configmaps/s/app/settings/t=text", "dir/secrets/s/app/keys/k=v1",
		"dir/inactive/s-app.json", "dir/inactive/s-self.json", "dir/manifests/s-self.json", "static/s-self.json",
	}
	activated := append([]string{"dir/manifests/s-app.json", "static/s-app.json"}, always...)
	look := func(what string, want []string) {
		t.Helper()
		p.look(t.Context())
		got := files(t, root)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: there are\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	look("both run", always)
	n.ready = nil
	delete(n.objects, "/api/v1/pods") // no answer
	look("one look without a sandbox", always)
	look("two looks", activated)
	n.ready, n.empty = []string{"s/app"}, true
	look("it has no container yet", activated)
	n.empty = false
	look("it runs again", always)
	n.objects["/api/v1/pods"] = `{"items": []}`
	look("all were deleted", nil)
}

// files are the files below a directory; those of Secrets and ConfigMaps with their content.
func files(t *testing.T, root string) []string {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err == nil && info.Mode() != fileMode {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		name, _ := filepath.Rel(root, path)
		text, _ := os.ReadFile(path)
		if filepath.Ext(path) == ".json" {
			if !json.Valid(text) {
				t.Errorf("%s: %s", path, text)
			}
			text = nil
		} else {
			name += "="
		}
		all[name+string(text)] = true
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(all))
}

func TestReplace(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a", "b")
	for i, want := range []bool{true, false} {
		if wrote, err := replace(path, []byte("x")); wrote != want || err != nil {
			t.Errorf("%d: wrote %v, %v", i, wrote, err)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("files: %v, %v", entries, err)
	}
}

func TestReportPrintsAnErrorOnce(t *testing.T) {
	t.Parallel()
	p := &program{errors: map[string]string{}}
	p.report("a", context.DeadlineExceeded, "b")
	if p.errors["a"] == "" {
		t.Error("it isn't stored")
	}
	p.report("a", nil, "")
	if p.errors["a"] != "" {
		t.Error("it isn't over")
	}
}

package patch

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
)

// The patches of the guides, with the current images, have the effect on a
// generated configuration that the guides describe. S-029, S-306, S-320, S-322
func TestGuidePatches(t *testing.T) {
	c, err := config.Generate(config.Options{Type: config.ControlPlane, Endpoint: "https://10.5.0.2:6443", Now: time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	// The configuration of a control plane may have neither of these.
	bare, err := Apply(doc, []byte(`[{"op": "remove", "path": "/cluster/serviceAccount"}, {"op": "remove", "path": "/cluster/aggregatorCA"}]`))
	if err != nil {
		t.Fatal(err)
	}
	root, err := tree.Parse(doc)
	if err != nil {
		t.Fatal(err)
	}
	pair := func(name string) string {
		var values map[string]string
		if err := tree.Field(tree.Field(root.Content[0], "cluster"), name).Decode(&values); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, tt := range []struct {
		doc   []byte
		patch string
		want  func(*config.Config) string
		is    string
	}{
		{doc, `[{"op": "replace", "path": "/machine/kubelet/image", "value": "ghcr.io/garboard-os/kubelet:v1.35.4"}]`, func(c *config.Config) string { return c.Machine.Kubelet.Image }, "ghcr.io/garboard-os/kubelet:v1.35.4"},
		{doc, `[{"op": "replace", "path": "/cluster/apiServer/image", "value": "registry.k8s.io/kube-apiserver:v1.35.4"}]`, func(c *config.Config) string { return c.Cluster.APIServer.Image }, "registry.k8s.io/kube-apiserver:v1.35.4"},
		{doc, `[{"op": "replace", "path": "/cluster/controllerManager/image", "value": "registry.k8s.io/kube-controller-manager:v1.35.4"}]`, func(c *config.Config) string { return c.Cluster.ControllerManager.Image }, "registry.k8s.io/kube-controller-manager:v1.35.4"},
		{doc, `[{"op": "replace", "path": "/cluster/scheduler/image", "value": "registry.k8s.io/kube-scheduler:v1.35.4"}]`, func(c *config.Config) string { return c.Cluster.Scheduler.Image }, "registry.k8s.io/kube-scheduler:v1.35.4"},
		{bare, `[{"op": "add", "path": "/cluster/serviceAccount", "value": ` + pair("serviceAccount") + `}, {"op": "add", "path": "/cluster/aggregatorCA", "value": ` + pair("aggregatorCA") + `}]`,
			func(c *config.Config) string { return string(c.Cluster.ServiceAccount.Key) }, string(c.Cluster.ServiceAccount.Key)},
	} {
		out, err := Apply(tt.doc, []byte(tt.patch))
		if err != nil {
			t.Errorf("%.80s: %v", tt.patch, err)
			continue
		}
		to, _, err := config.Load("patched", out)
		if err != nil {
			t.Errorf("%.80s: %v", tt.patch, err)
		} else if tt.want(to) != tt.is {
			t.Errorf("%.80s: got %q", tt.patch, tt.want(to))
		}
	}
	if strings.Contains(string(bare), "aggregatorCA") {
		t.Error("the authority is still there")
	}
}

package controlplane

import (
	"slices"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
)

// auditRule is the part of audit.k8s.io/v1 that the default policy uses.
type auditRule struct {
	Level     string
	Verbs     []string
	Resources []struct {
		Group     string
		Resources []string
	}
}

// level is what the API server logs of a request: the first matching rule decides.
func level(rules []auditRule, verb, group, resource string) string {
	for _, r := range rules {
		in := len(r.Resources) == 0
		for _, of := range r.Resources {
			in = in || of.Group == group && slices.Contains(of.Resources, resource)
		}
		if in && (len(r.Verbs) == 0 || slices.Contains(r.Verbs, verb)) {
			return r.Level
		}
	}
	return "None"
}

// The log has the user and the object of each change, and no content of objects.
func TestDefaultAuditPolicy(t *testing.T) {
	files, err := apiServerFiles(&config.APIServer{})
	put(t, err)
	var policy struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		OmitStages []string `yaml:"omitStages"`
		Rules      []auditRule
	}
	put(t, yaml.Unmarshal(files[auditFile], &policy))
	if policy.APIVersion != "audit.k8s.io/v1" || policy.Kind != "Policy" || !slices.Equal(policy.OmitStages, []string{"RequestReceived"}) {
		t.Errorf("%+v", policy)
	}
	for _, r := range policy.Rules {
		if r.Level != "None" && r.Level != "Metadata" {
			t.Errorf("the level %s has the content of objects", r.Level)
		}
	}
	for _, tt := range []struct{ verb, group, resource, want string }{
		{"create", "", "secrets", "Metadata"},
		{"update", "", "configmaps", "Metadata"},
		{"patch", "apps", "deployments", "Metadata"},
		{"delete", "", "pods", "Metadata"},
		{"deletecollection", "", "pods", "Metadata"},
		{"create", "", "serviceaccounts/token", "Metadata"},
		{"create", "rbac.authorization.k8s.io", "clusterrolebindings", "Metadata"},
		{"get", "", "pods/exec", "Metadata"}, // by WebSocket
		{"create", "", "pods/exec", "Metadata"},
		{"get", "", "nodes/proxy", "Metadata"},
		{"get", "", "secrets", "None"},
		{"list", "", "secrets", "None"},
		{"watch", "", "pods", "None"},
		{"update", "coordination.k8s.io", "leases", "None"},
		{"create", "", "events", "None"},
		{"patch", "events.k8s.io", "events", "None"},
		{"create", "authentication.k8s.io", "tokenreviews", "None"},
		{"create", "authorization.k8s.io", "subjectaccessreviews", "None"},
	} {
		if got := level(policy.Rules, tt.verb, tt.group, tt.resource); got != tt.want {
			t.Errorf("%s %s/%s is logged at %s, want %s", tt.verb, tt.group, tt.resource, got, tt.want)
		}
	}
}

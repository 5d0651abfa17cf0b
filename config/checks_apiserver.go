package config

import "reflect"

// auditPolicy has the fields of Policy in audit.k8s.io/v1.
type auditPolicy struct {
	APIVersion        string       `yaml:"apiVersion"`
	Kind              string       `yaml:"kind"`
	Metadata          Object       `yaml:"metadata"`
	Rules             []auditRule  `yaml:"rules"`
	OmitStages        []auditStage `yaml:"omitStages"`
	OmitManagedFields bool         `yaml:"omitManagedFields"`
}

type auditRule struct {
	Level             auditLevel       `yaml:"level"`
	Users             []string         `yaml:"users"`
	UserGroups        []string         `yaml:"userGroups"`
	Verbs             []string         `yaml:"verbs"`
	Resources         []auditResources `yaml:"resources"`
	Namespaces        []string         `yaml:"namespaces"`
	NonResourceURLs   []string         `yaml:"nonResourceURLs"`
	OmitStages        []auditStage     `yaml:"omitStages"`
	OmitManagedFields *bool            `yaml:"omitManagedFields"`
}

type auditResources struct {
	Group         string   `yaml:"group"`
	Resources     []string `yaml:"resources"`
	ResourceNames []string `yaml:"resourceNames"`
}

type (
	auditLevel string
	auditStage string
)

// checkAudit refuses a policy with which the API server would not start, and unknown
// fields, which it would ignore.
func checkAudit(c *Config, r *report) {
	if c.Cluster.APIServer.AuditPolicy == "" {
		return
	}
	where := at("cluster", "apiServer", "auditPolicy")
	n, _, _ := r.locate(where)
	var p auditPolicy
	d := &decoder{report: r, budget: maxExpanded, where: where}
	d.value(n, reflect.ValueOf(&p).Elem())
	values{r, map[string]bool{}}.fields(reflect.ValueOf(p), where.String(), where)
	for i, rule := range p.Rules {
		rule.check(r, where.with("rules", i))
	}
}

func (rule auditRule) check(r *report, where place) {
	if len(rule.NonResourceURLs) > 0 && len(rule.Resources)+len(rule.Namespaces) > 0 {
		r.bad(where.with("nonResourceURLs"), "a rule is for resources or for URLs, not for both")
	}
	for i, resources := range rule.Resources {
		if len(resources.ResourceNames) > 0 && len(resources.Resources) == 0 {
			r.bad(where.with("resources", i, "resourceNames"), "needs resources: names alone select nothing")
		}
	}
}

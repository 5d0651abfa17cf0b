package kubeclient

import (
	"slices"
	"strings"
	"time"
)

// Object is any Kubernetes object as JSON has it: maps, slices, strings, bools
// and float64. The few fields that every object has get a method; the rest is
// reached with At.
type Object map[string]any

// APIVersion is "group/version", or "version" in the core group.
func (o Object) APIVersion() string { s, _ := o["apiVersion"].(string); return s }

// Kind is "Pod", "ClusterRoleBinding".
func (o Object) Kind() string { s, _ := o["kind"].(string); return s }

// Name is metadata.name.
func (o Object) Name() string { return o.Text("metadata", "name") }

// Namespace is metadata.namespace; "" for objects of the cluster.
func (o Object) Namespace() string { return o.Text("metadata", "namespace") }

// ResourceVersion is metadata.resourceVersion, from which a watch goes on.
func (o Object) ResourceVersion() string { return o.Text("metadata", "resourceVersion") }

// At walks path through nested maps; nil where one is missing.
func (o Object) At(path ...string) any {
	var v any = map[string]any(o)
	for _, key := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[key]
	}
	return v
}

// Text is the string at path, or "".
func (o Object) Text(path ...string) string { s, _ := o.At(path...).(string); return s }

// Items are the elements of a list object.
func (o Object) Items() []Object { return o.List("items") }

// List is the list of objects at path; elements that aren't objects are left out.
func (o Object) List(path ...string) []Object {
	raw, _ := o.At(path...).([]any)
	items := make([]Object, 0, len(raw))
	for _, v := range raw {
		if m, ok := v.(map[string]any); ok {
			items = append(items, m)
		}
	}
	return items
}

// Time is that at path; zero: there is none.
func (o Object) Time(path ...string) time.Time {
	t, _ := time.Parse(time.RFC3339, o.Text(path...))
	return t
}

// ConditionOf is the one of that type in status.conditions; nil: there is none.
func (o Object) ConditionOf(typ string) Object {
	return append(slices.DeleteFunc(o.List("status", "conditions"), func(c Object) bool { return c.Text("type") != typ }), nil)[0]
}

// Condition says whether that one has the status "True".
func (o Object) Condition(typ string) bool { return o.ConditionOf(typ).Text("status") == "True" }

// Ref names the object.
func (o Object) Ref() Ref {
	return Ref{APIVersion: o.APIVersion(), Kind: o.Kind(), Namespace: o.Namespace(), Name: o.Name()}
}

// String names the object as logs do: group/version/Kind/name, where the core
// group is empty: "/v1/Secret/bootstrap-token-abcdef".
func (o Object) String() string {
	gv := o.APIVersion()
	if !strings.Contains(gv, "/") {
		gv = "/" + gv
	}
	return gv + "/" + o.Kind() + "/" + o.Name()
}

// MarshalYAML hides what Secrets hold, also in a list: YAML is for people and for files that
// people read. What goes to an API server is JSON, and complete.
func (o Object) MarshalYAML() (any, error) { return withoutSecrets(map[string]any(o)), nil }

func withoutSecrets(v any) any {
	switch v := v.(type) {
	case map[string]any:
		shown := make(map[string]any, len(v))
		for key, value := range v {
			shown[key] = withoutSecrets(value)
		}
		if metadata, _ := shown["metadata"].(map[string]any); v["kind"] == "Secret" {
			hideValues(shown, "data")
			hideValues(shown, "stringData")
			hideValues(metadata, "annotations") // kubectl repeats the whole object in one
		}
		return shown
	case []any:
		shown := make([]any, len(v))
		for i, value := range v {
			shown[i] = withoutSecrets(value)
		}
		return shown
	}
	return v
}

// hideValues keeps the keys of a field that is a map.
func hideValues(in map[string]any, field string) {
	switch values := in[field].(type) {
	case nil:
	case map[string]any:
		for key := range values {
			values[key] = "(secret)"
		}
	default:
		in[field] = "(secret)"
	}
}

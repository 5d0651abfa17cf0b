package config

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// Object is a mapping of an API that isn't ours, as JSON with sorted keys; ""
// is none. The node passes it on to the program that reads it.
type Object string

// maxDepth limits the nesting of an Object; the API server's configuration needs six.
const maxDepth = 50

// MarshalYAML implements yaml.Marshaler.
func (o Object) MarshalYAML() (any, error) {
	decoder := json.NewDecoder(strings.NewReader(string(o)))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return nil, err
	}
	return objectNode(v), nil
}

func objectNode(v any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode}
	switch v := v.(type) {
	case map[string]any:
		n.Kind = yaml.MappingNode
		for _, key := range slices.Sorted(maps.Keys(v)) {
			n.Content = append(n.Content, tree.Quoted(key), objectNode(v[key]))
		}
	case []any:
		n.Kind = yaml.SequenceNode
		for _, entry := range v {
			n.Content = append(n.Content, objectNode(entry))
		}
	case string:
		return tree.Quoted(v)
	case json.Number:
		n.Value = v.String()
	case bool:
		n.Value = map[bool]string{true: "true", false: "false"}[v]
	default:
		n.Value = "null"
	}
	return n
}

// object decodes an Object.
func (d *decoder) object(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.bad(n, "must be a mapping, not %s", kindOf(n))
		return
	}
	text, err := json.Marshal(d.free(n, len(d.where)+maxDepth))
	if err != nil { // infinite numbers, which JSON doesn't have
		d.bad(n, "%v", err)
		return
	}
	v.SetString(string(text))
}

// free is the value of a node that has no type here. deepest limits the length of its path.
func (d *decoder) free(n *yaml.Node, deepest int) any {
	n = resolve(n)
	if !d.spend(n) || d.tagged(n) || tree.IsNull(n) {
		return nil
	}
	if len(d.where) > deepest {
		d.bad(n, "is nested deeper than %d levels", maxDepth)
		return nil
	}
	switch n.Kind {
	case yaml.MappingNode:
		mapping := map[string]any{}
		d.pairs(n, func(key, value *yaml.Node) { mapping[resolve(key).Value] = d.free(value, deepest) })
		return mapping
	case yaml.SequenceNode:
		list := []any{}
		for i, entry := range n.Content {
			if d.budget < 0 || d.full() {
				break
			}
			d.inside(i, func() { list = append(list, d.free(entry, deepest)) })
		}
		return list
	}
	var v any
	switch n.ShortTag() {
	case "!!bool", "!!int", "!!float":
		if err := n.Decode(&v); err != nil {
			d.bad(n, "%v", err)
		}
		return v
	}
	return n.Value
}

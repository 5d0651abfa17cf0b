package patch

import (
	"encoding/json"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/tree"
)

// rewrite returns old, which may be nil, changed to the value v, whose kinds
// are those that decode makes. Equal nodes are kept; entries of lists are
// compared from both ends.
func rewrite(old *yaml.Node, v any) *yaml.Node {
	switch v := v.(type) {
	case *object:
		return rewriteMapping(old, v)
	case []any:
		return rewriteList(old, v)
	}
	if old != nil && old.Kind == yaml.ScalarNode && scalarOf(old) == v {
		return old
	}
	return merge.InPlaceOf(old, scalar(v))
}

func rewriteMapping(old *yaml.Node, v *object) *yaml.Node {
	if old == nil || old.Kind != yaml.MappingNode {
		old = merge.InPlaceOf(old, &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"})
	}
	kept := old.Content[:0:0]
	known := make(map[string]bool, len(v.keys))
	for i := 0; i+1 < len(old.Content); i += 2 {
		key := old.Content[i]
		if inner, there := v.values[key.Value]; there && !known[key.Value] {
			kept = append(kept, key, rewrite(old.Content[i+1], inner))
			known[key.Value] = true
		}
	}
	for _, key := range v.keys {
		if !known[key] {
			kept = append(kept, tree.Quoted(key), rewrite(nil, v.values[key]))
		}
	}
	old.Content = kept
	return old
}

func rewriteList(old *yaml.Node, v []any) *yaml.Node {
	if old == nil || old.Kind != yaml.SequenceNode {
		old = merge.InPlaceOf(old, &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"})
	}
	head, tail := 0, 0
	for head < min(len(old.Content), len(v)) && says(old.Content[head], v[head]) {
		head++
	}
	for tail < min(len(old.Content), len(v))-head && says(old.Content[len(old.Content)-1-tail], v[len(v)-1-tail]) {
		tail++
	}
	middle := old.Content[head : len(old.Content)-tail]
	inPlace := len(middle) == len(v)-head-tail // entries changed; none was added or removed
	out := append([]*yaml.Node{}, old.Content[:head]...)
	for i, inner := range v[head : len(v)-tail] {
		var before *yaml.Node
		if inPlace {
			before = middle[i]
		}
		out = append(out, rewrite(before, inner))
	}
	old.Content = append(out, old.Content[len(old.Content)-tail:]...)
	return old
}

// says reports whether a node has the value v already.
func says(n *yaml.Node, v any) bool {
	switch v := v.(type) {
	case *object:
		if n.Kind != yaml.MappingNode || len(n.Content) != 2*len(v.keys) {
			return false
		}
		for i := 0; i+1 < len(n.Content); i += 2 {
			inner, there := v.values[n.Content[i].Value]
			if !there || !says(n.Content[i+1], inner) {
				return false
			}
		}
		return true
	case []any:
		if n.Kind != yaml.SequenceNode || len(n.Content) != len(v) {
			return false
		}
		for i := range v {
			if !says(n.Content[i], v[i]) {
				return false
			}
		}
		return true
	}
	return n.Kind == yaml.ScalarNode && scalarOf(n) == v
}

// scalar is the node of such a value.
func scalar(v any) *yaml.Node {
	switch v := v.(type) {
	case nil:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null"}
	case bool:
		value := "false"
		if v {
			value = "true"
		}
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: value}
	case json.Number:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: v.String()}
	}
	return tree.Quoted(v.(string))
}

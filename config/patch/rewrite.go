package patch

import (
	"encoding/json"
	"slices"
	"strconv"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/tree"
)

// rewrite returns old changed to the value v, which fresh has made. Equal nodes are kept;
// entries of lists are compared from both ends.
func rewrite(old, v *yaml.Node) *yaml.Node {
	switch {
	case old.Kind != v.Kind, old.Kind == yaml.ScalarNode && !same(old, v):
		return merge.InPlaceOf(old, v)
	case old.Kind == yaml.MappingNode:
		rewriteMapping(old, v)
	case old.Kind == yaml.SequenceNode:
		rewriteList(old, v)
	}
	return old
}

func rewriteMapping(old, v *yaml.Node) {
	kept, left := old.Content[:0:0], byKey(v)
	for pair := range slices.Chunk(old.Content, 2) {
		if inner, there := left[pair[0].Value]; there {
			kept = append(kept, pair[0], rewrite(pair[1], inner))
			delete(left, pair[0].Value)
		}
	}
	for pair := range slices.Chunk(v.Content, 2) {
		if _, isNew := left[pair[0].Value]; isNew {
			kept = append(kept, pair...)
		}
	}
	old.Content = kept
}

func byKey(mapping *yaml.Node) map[string]*yaml.Node {
	all := make(map[string]*yaml.Node, len(mapping.Content)/2)
	for pair := range slices.Chunk(mapping.Content, 2) {
		all[pair[0].Value] = pair[1]
	}
	return all
}

func rewriteList(old, v *yaml.Node) {
	was, is := old.Content, v.Content
	head, tail := 0, 0
	for head < min(len(was), len(is)) && same(was[head], is[head]) {
		head++
	}
	for tail < min(len(was), len(is))-head && same(was[len(was)-1-tail], is[len(is)-1-tail]) {
		tail++
	}
	middle := slices.Clone(is[head : len(is)-tail])
	if len(was) == len(is) { // entries changed; none was added or removed
		for i, inner := range middle {
			middle[i] = rewrite(was[head+i], inner)
		}
	}
	old.Content = slices.Concat(was[:head], middle, was[len(was)-tail:])
}

// same reports whether two nodes have the same value.
func same(a, b *yaml.Node) bool {
	if a.Kind != b.Kind || len(a.Content) != len(b.Content) {
		return false
	}
	switch a.Kind {
	case yaml.SequenceNode:
		return slices.EqualFunc(a.Content, b.Content, same)
	case yaml.ScalarNode:
		a, b = fresh(a), fresh(b)
		return a.Value == b.Value && a.ShortTag() == b.ShortTag()
	}
	others := byKey(b)
	for pair := range slices.Chunk(a.Content, 2) {
		if other := others[pair[0].Value]; other == nil || !same(pair[1], other) {
			return false
		}
	}
	return true
}

// fresh is a copy of a value as JSON has it, in the usual style, with each key once. A scalar
// that is a number in YAML, but isn't spelled like a number of JSON, is text: permissions
// (0644) and tokens (123456.0123456789012345) must keep every digit.
func fresh(n *yaml.Node) *yaml.Node {
	c := &yaml.Node{Kind: n.Kind}
	switch tag := n.ShortTag(); {
	case n.Kind == yaml.SequenceNode:
		for _, inner := range n.Content {
			c.Content = append(c.Content, fresh(inner))
		}
	case n.Kind == yaml.MappingNode:
		last := byKey(n)
		for pair := range slices.Chunk(n.Content, 2) {
			if value, first := last[pair[0].Value]; first {
				c.Content = append(c.Content, tree.Quoted(pair[0].Value), fresh(value))
				delete(last, pair[0].Value)
			}
		}
	case tag == "!!null":
		c.Tag, c.Value = tag, "null"
	case tag == "!!int" && json.Valid([]byte(n.Value)), tag == "!!float" && json.Valid([]byte(n.Value)):
		c.Value = n.Value
	default:
		var v bool
		if tag != "!!bool" || n.Decode(&v) != nil {
			return tree.Quoted(n.Value)
		}
		c.Tag, c.Value = tag, strconv.FormatBool(v)
	}
	return c
}

// size is about the number of bytes of a value as text.
func size(n *yaml.Node) (bytes int) {
	for _, inner := range n.Content {
		bytes += size(inner)
	}
	return bytes + len(n.Value) + 1
}

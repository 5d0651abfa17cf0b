package patch

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/tree"
)

// maxSteps limits the operations of a JSON patch: far above real use, and low
// enough although each operation can move a whole list.
const maxSteps = 1_000

// steps applies the operations of a JSON patch to doc: to a copy of its values, to which doc is then rewritten.
func steps(doc, list *yaml.Node) (*yaml.Node, error) {
	if len(list.Content) > maxSteps {
		return nil, fmt.Errorf("the patch has %d operations; there may be %d", len(list.Content), maxSteps)
	}
	for i, n := range list.Content {
		if err := check(n); err != nil {
			return nil, fmt.Errorf("operation %d: %w", i+1, err)
		}
	}
	now := &values{doc: &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{fresh(doc)}}}
	for i, n := range list.Content {
		if err := now.do(n); err != nil {
			return nil, fmt.Errorf("operation %d: %w", i+1, err)
		}
	}
	return rewrite(doc, now.doc.Content[0]), nil
}

// members are the members of each operation beside op and path (RFC 6902, section 4).
var members = map[string]string{"add": "value", "replace": "value", "test": "value", "move": "from", "copy": "from", "remove": ""}

// check refuses what is no operation.
func check(n *yaml.Node) error {
	if n.Kind != yaml.MappingNode {
		return errors.New("is not a mapping with op and path")
	}
	kind := textOf(n, "op")
	needs, known := members[kind]
	if !known {
		return fmt.Errorf("op %q is not one of add, remove, replace, move, copy, test", merge.Brief(kind))
	}
	if needs != "" && tree.Field(n, needs) == nil {
		return fmt.Errorf("%s lacks %s", kind, needs)
	}
	for _, name := range []string{"path", needs} {
		pointer := tree.Field(n, name)
		switch {
		case name == "value" || name == "":
		case pointer == nil || pointer.Kind != yaml.ScalarNode:
			return fmt.Errorf("%s lacks %s", kind, name)
		case pointer.Value == "" && needs == "value":
			// the whole document
		case !strings.HasPrefix(pointer.Value, "/"):
			return fmt.Errorf("%s %q doesn't start with a slash; did you mean %q", name, merge.Brief(pointer.Value), "/"+strings.ReplaceAll(strings.TrimPrefix(merge.Brief(pointer.Value), "."), ".", "/"))
		}
	}
	if kind == "move" && strings.HasPrefix(textOf(n, "path"), textOf(n, "from")+"/") {
		return fmt.Errorf("%s can't be moved into itself", merge.Brief(textOf(n, "from")))
	}
	return nil
}

func textOf(n *yaml.Node, key string) string {
	if v := tree.Field(n, key); v != nil {
		return v.Value
	}
	return ""
}

// values are those of the document while the operations are carried out.
type values struct {
	doc    *yaml.Node
	copied int // bytes
}

// do carries out one operation. Its error says what is possible instead.
func (v *values) do(op *yaml.Node) error {
	kind, path := textOf(op, "op"), textOf(op, "path")
	before, from := find(v.doc, path), find(v.doc, textOf(op, "from"))
	refused := before.explain(kind, path)
	if members[kind] == "from" && from.missing != "" {
		return fmt.Errorf("%s: there is no %s in the configuration", kind, merge.Brief(from.missing))
	}
	var value *yaml.Node
	switch kind {
	case "add", "replace":
		value = fresh(tree.Field(op, "value"))
	case "copy":
		if v.copied += size(from.node()); v.copied > tree.MaxSize {
			return fmt.Errorf("copy %s: what is copied is larger than the %d bytes of a configuration",
				merge.Brief(path), tree.MaxSize)
		}
		value = fresh(from.node())
	case "move":
		value = from.node()
		from.remove()
	case "test":
		wanted := tree.Field(op, "value")
		null := before.missing == path && before.parent.Kind == yaml.MappingNode && wanted.ShortTag() == "!!null"
		if null || before.missing == "" && same(before.node(), fresh(wanted)) {
			return nil
		}
		return fmt.Errorf("test: %s isn't what the patch expects", merge.Brief(path))
	}
	to := find(v.doc, path)
	isThere := to.missing == ""
	isNew := (isThere || to.missing == path) && kind != "remove" && kind != "replace"
	switch all := &to.parent.Content; {
	case path == "" && value.Kind == yaml.ScalarNode:
		return fmt.Errorf("%s: the value isn't a configuration", kind)
	case isThere && kind == "remove":
		to.remove()
	case isThere && (kind == "replace" || to.parent.Kind != yaml.SequenceNode):
		(*all)[to.at] = value
	case isNew && to.parent.Kind == yaml.MappingNode:
		*all = append(*all, tree.Quoted(to.name), value)
	case isNew && to.parent.Kind == yaml.SequenceNode && to.at >= 0 && to.at <= len(*all):
		*all = slices.Insert(*all, to.at, value)
	case before.missing == "": // until the move
		return to.explain(kind, path)
	default:
		return refused
	}
	return nil
}

// place is where a JSON pointer leads.
type place struct {
	parent  *yaml.Node // the last node that is there, or the one around what the pointer means
	name    string     // in parent
	at      int        // the same as an index in the parent's content
	missing string     // the pointer to the first part that isn't there
}

// find follows a JSON pointer as far as it exists.
func find(doc *yaml.Node, pointer string) place {
	p := place{parent: doc}
	parts := strings.Split(pointer, "/")
	for i, part := range parts[1:] {
		p = place{parent: p.node(), name: strings.NewReplacer("~1", "/", "~0", "~").Replace(part), at: -1}
		if n, err := strconv.Atoi(p.name); p.parent.Kind == yaml.SequenceNode && err == nil {
			p.at = n
		} else if p.parent.Kind == yaml.SequenceNode && p.name == "-" {
			p.at = len(p.parent.Content)
		} else if key := tree.IndexOf(p.parent, p.name); key >= 0 {
			p.at = key + 1
		}
		if p.at < 0 || p.at >= len(p.parent.Content) {
			p.missing = strings.Join(parts[:i+2], "/")
			break
		}
	}
	return p
}

func (p place) node() *yaml.Node { return p.parent.Content[p.at] }

func (p place) remove() {
	from := p.at
	if p.parent.Kind == yaml.MappingNode {
		from-- // the key
	}
	p.parent.Content = slices.Delete(p.parent.Content, from, p.at+1)
}

// explain says why there is nothing at a place, and proposes what to do instead.
func (p place) explain(kind, path string) error {
	isAll := p.missing == path
	path, missing := merge.Brief(path), merge.Brief(p.missing)
	switch {
	case p.parent.Kind == yaml.SequenceNode:
		return fmt.Errorf("%s: there is no %s in the configuration; the list has %d entries, counted from 0, and - is behind the last", kind, missing, len(p.parent.Content))
	case kind == "remove":
		return fmt.Errorf("remove: there is no %s in the configuration", missing)
	case isAll:
		return fmt.Errorf("%s: there is no %s in the configuration; use add instead of %s", kind, path, kind)
	}
	return fmt.Errorf("%s %s: there is no %s in the configuration; add %s first, with the rest inside of its value", kind, path, missing, missing)
}

// Package patch changes a configuration's text by a patch: a JSON patch (RFC
// 6902), which says step by step what to do, or a strategic merge patch, which
// is a piece of configuration as it should be. Both may be written in JSON or in
// YAML. What the patch doesn't touch stays as its author wrote it, comments and
// order included.
//
// In a strategic merge patch
//
//   - mappings merge, key by key; null deletes a key, "$patch: delete" does, too,
//     and "$patch: replace" takes the mapping as it is;
//   - lists whose entries have an identity (config.ListKey: interfaces by their
//     name, files by their path, and so on) merge entry by entry, new ones come
//     last, and the second entry of a name goes to the second; "$patch: delete"
//     in an entry deletes all of its name, "$patch: replace" takes the entry as it
//     is, and "- $patch: replace" alone makes the list the one given;
//   - anything else replaces what was there.
//
// The patch is applied on the client. The node only ever sees whole documents,
// so its PID 1 doesn't link this package.
package patch

import (
	"errors"
	"fmt"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// Apply returns the text of doc as changed by patch. It doesn't check the
// result: config.Load does. A patch that can't be applied changes nothing.
func Apply(doc, patch []byte) ([]byte, error) {
	from, err := tree.Parse(doc)
	if err != nil {
		return nil, fmt.Errorf("patch: the configuration %w", err)
	}
	by, err := tree.Parse(patch)
	if err != nil {
		return nil, fmt.Errorf("patch: the patch %w", err)
	}
	if err := tree.Expand(from); err != nil {
		return nil, fmt.Errorf("patch: the configuration %w", err)
	}
	if err := tree.Expand(by); err != nil {
		return nil, fmt.Errorf("patch: the patch %w", err)
	}
	if from.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("patch: the configuration is not a mapping")
	}
	ours(by, by.Content[0].Style&yaml.FlowStyle != 0)
	var to *yaml.Node
	switch top := by.Content[0]; {
	case top.Kind == yaml.SequenceNode:
		to, err = steps(from.Content[0], top)
	case top.Kind == yaml.MappingNode && field(top, "op") != nil && field(top, "path") != nil:
		err = errors.New("a JSON patch is a list; put the operation in brackets: [{…}]")
	case top.Kind == yaml.MappingNode:
		to, err = merged(from.Content[0], top)
	default:
		err = errors.New("the patch is neither a list of operations nor a mapping to merge")
	}
	if err != nil {
		return nil, fmt.Errorf("patch: %w", err)
	}
	from.Content[0] = to
	out, err := tree.Text(doc, from)
	if err != nil {
		return nil, fmt.Errorf("patch: the result %w", err)
	}
	return out, nil
}

// field is the value of a key in a mapping, or nil.
func field(n *yaml.Node, key string) *yaml.Node {
	if i := indexOf(n, key); i >= 0 {
		return n.Content[i+1]
	}
	return nil
}

// indexOf is where in the content of a mapping a key is, or -1.
func indexOf(n *yaml.Node, key string) int {
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return i
			}
		}
	}
	return -1
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// Package merge changes a configuration's text by a strategic merge patch: a piece of
// configuration as it should be, in JSON or in YAML. What the patch doesn't touch stays as
// its author wrote it, comments and order included.
//
//   - Mappings merge, key by key; null deletes a key, "$patch: delete" does, too, and
//     "$patch: replace" takes the mapping as it is.
//   - Lists whose entries have an identity (config.ListKeys: interfaces by their name,
//     files by their path, and so on) merge entry by entry, and new ones come last.
//     Which of several entries of a name is meant: see choose. "$patch: delete" in an
//     entry deletes all of its name, "$patch: replace" takes the entry as it is, and
//     "- $patch: replace" alone makes the list the one given.
//   - Anything else replaces what was there.
package merge

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
)

// Apply returns the text of doc as changed by patch. It doesn't check the result:
// config.Load does. A patch that can't be applied changes nothing.
func Apply(doc, patch []byte) ([]byte, error) { return Change(doc, patch, Nodes) }

// Change is Apply for a patch of any kind: to makes the new tree from the old
// one and the patch.
func Change(doc, patch []byte, to func(from, by *yaml.Node) (*yaml.Node, error)) ([]byte, error) {
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
	if from.Content[0], err = to(from.Content[0], by.Content[0]); err != nil {
		return nil, fmt.Errorf("patch: %w", err)
	}
	out, err := tree.Text(doc, from)
	if err != nil {
		return nil, fmt.Errorf("patch: the result %w", err)
	}
	return out, nil
}

// directive is the key of an instruction other than to merge.
const directive = "$patch"

const (
	doDelete  = "delete"
	doReplace = "replace"
	doMerge   = "merge"
)

// Nodes merges the tree of a patch into the tree of a document. The caller must
// not use either afterwards.
func Nodes(doc, patch *yaml.Node) (*yaml.Node, error) {
	if patch.Kind != yaml.MappingNode {
		return nil, errors.New("the patch is neither a list of operations nor a mapping to merge")
	}
	ours(patch, patch.Style&yaml.FlowStyle != 0)
	out, err := merge(doc, patch, "")
	if err != nil {
		return nil, err
	}
	if out == nil {
		return nil, errors.New("the patch deletes the whole configuration")
	}
	return out, nil
}

// merge is old, which may be nil, with patch merged into it; nil if nothing is
// left. path is their place in the schema, with [] for entries.
func merge(old, patch *yaml.Node, path string) (*yaml.Node, error) {
	if tree.IsNull(patch) {
		return nil, nil
	}
	todo, err := order(patch)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Brief(path), err)
	}
	switch {
	case todo == doDelete:
		return nil, nil
	case patch.Kind == yaml.MappingNode:
		if todo == doReplace || old == nil || old.Kind != yaml.MappingNode {
			old = like(old, patch)
		}
		return old, mergeMapping(old, patch, path)
	case patch.Kind == yaml.SequenceNode:
		return mergeList(old, patch, path)
	case old != nil && tree.Equal(old, patch):
		return old, nil
	}
	return InPlaceOf(old, patch), nil
}

// order returns the directive of a mapping and removes it.
func order(patch *yaml.Node) (string, error) {
	i := tree.IndexOf(patch, directive)
	if i < 0 {
		return doMerge, nil
	}
	todo := patch.Content[i+1].Value
	if !slices.Contains([]string{doDelete, doReplace, doMerge}, todo) {
		return "", fmt.Errorf("%s: %q is not one of %s, %s, %s", directive, Brief(todo), doDelete, doReplace, doMerge)
	}
	patch.Content = slices.Delete(patch.Content, i, i+2)
	return todo, nil
}

func mergeMapping(old, patch *yaml.Node, path string) error {
	places := make(map[string]int, len(old.Content)/2)
	for i := 0; i+1 < len(old.Content); i += 2 {
		if _, twice := places[old.Content[i].Value]; !twice {
			places[old.Content[i].Value] = i + 1
		}
	}
	for i := 0; i+1 < len(patch.Content); i += 2 {
		key, value := patch.Content[i], patch.Content[i+1]
		at, known := places[key.Value]
		var before *yaml.Node
		if known {
			before = old.Content[at]
		}
		after, err := merge(before, value, within(path, key.Value))
		switch {
		case err != nil:
			return err
		case known:
			old.Content[at] = after // nil is removed below
		case after != nil:
			places[key.Value] = len(old.Content) + 1
			old.Content = append(old.Content, key, after)
		}
	}
	kept := old.Content[:0:0]
	for i := 0; i+1 < len(old.Content); i += 2 {
		if old.Content[i+1] != nil {
			kept = append(kept, old.Content[i], old.Content[i+1])
		}
	}
	old.Content = kept
	return nil
}

// within is the path of a key. The schema has [] for the keys of mappings that
// aren't fields.
func within(path, key string) string {
	if config.IsMap(path) {
		return path + "[]"
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func mergeList(old, patch *yaml.Node, path string) (*yaml.Node, error) {
	keys, _ := config.ListKeys(path)
	whole := len(keys) == 0 || old == nil || old.Kind != yaml.SequenceNode
	if i := slices.IndexFunc(patch.Content, isReplaceOnly); i >= 0 {
		patch.Content = slices.Delete(patch.Content, i, i+1)
		whole = true
	}
	if whole {
		if old != nil && tree.Equal(old, patch) {
			return old, nil
		}
		before := old
		old = like(before, patch)
		if len(keys) == 0 { // entries without an identity are replaced as a whole
			old.Content = patch.Content
			return old, nil
		}
	}
	return old, mergeEntries(old, patch, path)
}

// mergeEntries merges two lists whose entries are identified by a key.
func mergeEntries(old, patch *yaml.Node, path string) error {
	if len(patch.Content)*(len(old.Content)+len(patch.Content)) > maxCompared {
		return fmt.Errorf("%s: has too many entries to merge", Brief(path))
	}
	l := list{path: path}
	l.keys, l.apart = config.ListKeys(path)
	gone, merged, ours := map[int]bool{}, map[int]bool{}, len(old.Content) // the others are new ones
	for _, entry := range patch.Content {
		if !slices.ContainsFunc(l.keys, func(key string) bool { return value(entry, key) != "" }) {
			return fmt.Errorf("%s: an entry has no %s, which identifies it", Brief(path), strings.Join(l.keys, ", "))
		}
		all := l.alike(old.Content[:ours], entry)
		known := slices.DeleteFunc(slices.Clone(all), func(i int) bool { return merged[i] })
		i := l.choose(old.Content, known, entry)
		if i < 0 && len(known) > 0 && len(l.alike(patch.Content, entry)) >= len(all) {
			i = known[0] // the patch has all of them
		}
		var before *yaml.Node
		if i >= 0 {
			before = old.Content[i]
			merged[i] = true
		}
		after, err := merge(before, entry, path+"[]")
		switch {
		case err != nil:
			return err
		case after == nil:
			for _, i := range known {
				gone[i], merged[i] = true, true
			}
		case before != nil:
			old.Content[i] = after
		default:
			old.Content = append(old.Content, after)
		}
	}
	kept := old.Content[:0:0]
	for i, entry := range old.Content {
		if !gone[i] {
			kept = append(kept, entry)
		}
	}
	old.Content = kept
	return nil
}

// isReplaceOnly reports whether an entry is only the directive to replace the
// list.
func isReplaceOnly(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode && len(n.Content) == 2 && n.Content[0].Value == directive && n.Content[1].Value == doReplace
}

// like is an empty mapping or list of the kind of patch, with the comments and
// the style of old.
func like(old, patch *yaml.Node) *yaml.Node {
	n := *patch
	n.Content = nil
	if old != nil && old.Kind == n.Kind {
		n.Style = old.Style
	}
	return InPlaceOf(old, &n)
}

// maxShown is the longest part of a path or a word that a message repeats, in bytes.
const maxShown = 200

// Brief is text, shortened for a message.
func Brief(text string) string { return config.Shorten(text, maxShown) }

// InPlaceOf is new with the comments of the node that it replaces, unless it has its own.
func InPlaceOf(old, new *yaml.Node) *yaml.Node {
	n := *new
	n.Line, n.Column = 0, 0 // it isn't from the document's text
	if old != nil && n.HeadComment == "" && n.LineComment == "" && n.FootComment == "" {
		n.HeadComment, n.LineComment, n.FootComment = old.HeadComment, old.LineComment, old.FootComment
	}
	return &n
}

// ours prepares nodes of the patch for the document: it removes their
// positions, and sets the usual style if the patch was JSON.
func ours(n *yaml.Node, restyle bool) {
	n.Line, n.Column = 0, 0
	if restyle {
		if n.Style &= yaml.TaggedStyle; n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
			n.Style |= tree.Quoted(n.Value).Style
		}
	}
	for _, inner := range n.Content {
		ours(inner, restyle)
	}
}

package patch

import (
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/tree"
)

// maxSteps limits the operations of a JSON patch: far above real use, and low
// enough although each operation can move a whole list.
const maxSteps = 1_000

// steps applies the operations of a JSON patch to doc.
func steps(doc, list *yaml.Node) (*yaml.Node, error) {
	if len(list.Content) > maxSteps {
		return nil, fmt.Errorf("the patch has %d operations; there may be %d", len(list.Content), maxSteps)
	}
	p := jsonpatch.Patch{}
	for i, n := range list.Content {
		op, err := step(n)
		if err != nil {
			return nil, fmt.Errorf("operation %d: %w", i+1, err)
		}
		p = append(p, op)
	}
	if len(p) == 0 {
		return doc, nil
	}
	before := encode(doc)
	after, err := apply(p, before)
	if err != nil {
		return nil, explain(p, before, err)
	}
	v, err := decode(after)
	if err != nil {
		return nil, err
	}
	return rewrite(doc, v), nil
}

// members are the members of each operation beside op and path (RFC 6902, section 4).
var members = map[string]string{"add": "value", "replace": "value", "test": "value", "move": "from", "copy": "from", "remove": ""}

// step checks one operation, so that the library gets only operations that it
// handles well.
func step(n *yaml.Node) (jsonpatch.Operation, error) {
	if n.Kind != yaml.MappingNode {
		return nil, errors.New("is not a mapping with op and path")
	}
	op := jsonpatch.Operation{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		raw := json.RawMessage(encode(n.Content[i+1]))
		op[n.Content[i].Value] = &raw
	}
	kind := textOf(n, "op")
	needs, known := members[kind]
	if !known {
		return nil, fmt.Errorf("op %q is not one of add, remove, replace, move, copy, test", merge.Brief(kind))
	}
	if needs != "" && op[needs] == nil {
		return nil, fmt.Errorf("%s lacks %s", kind, needs)
	}
	for _, name := range []string{"path", "from"} {
		if name == "from" && needs != "from" {
			continue
		}
		pointer := merge.Field(n, name)
		switch {
		case pointer == nil || pointer.Kind != yaml.ScalarNode:
			return nil, fmt.Errorf("%s lacks %s", kind, name)
		case pointer.Value == "" && (kind == "add" || kind == "replace" || kind == "test"):
			// the whole document
		case !strings.HasPrefix(pointer.Value, "/"):
			return nil, fmt.Errorf("%s %q doesn't start with a slash; did you mean %q", name, merge.Brief(pointer.Value), "/"+strings.ReplaceAll(strings.TrimPrefix(merge.Brief(pointer.Value), "."), ".", "/"))
		}
	}
	if kind == "move" && strings.HasPrefix(textOf(n, "path"), textOf(n, "from")+"/") {
		return nil, fmt.Errorf("%s can't be moved into itself", merge.Brief(textOf(n, "from")))
	}
	return op, nil
}

func textOf(n *yaml.Node, key string) string {
	if v := merge.Field(n, key); v != nil {
		return v.Value
	}
	return ""
}

func apply(p jsonpatch.Patch, doc []byte) (out []byte, err error) {
	defer func() {
		// The library uses some indices of lists before it checks them.
		if r := recover(); r != nil {
			out, err = nil, fmt.Errorf("%v", r)
		}
	}()
	options := jsonpatch.NewApplyOptions()
	options.SupportNegativeIndices = false // RFC 6901 has none
	options.AccumulatedCopySizeLimit = tree.MaxSize
	options.EscapeHTML = false
	return p.ApplyWithOptions(doc, options)
}

// explain finds the operation that failed and proposes what to do instead. The
// library stops at the first one, but doesn't say which it was.
func explain(p jsonpatch.Patch, doc []byte, err error) error {
	i := sort.Search(len(p)-1, func(i int) bool {
		_, err := apply(p[:i+1], doc)
		return err != nil
	})
	if _, one := apply(p[:i+1], doc); one != nil {
		err = one
	}
	before, _ := apply(p[:i], doc)
	var root any
	if json.Unmarshal(before, &root) != nil {
		return fmt.Errorf("operation %d: %s", i+1, merge.Brief(err.Error()))
	}
	kind := p[i].Kind()
	path, _ := p[i].Path()
	if from, fromErr := p[i].From(); fromErr == nil && members[kind] == "from" {
		if _, missing := find(root, from); missing != "" {
			return fmt.Errorf("operation %d: %s: there is no %s in the configuration", i+1, kind, merge.Brief(missing))
		}
	}
	parent, missing := find(root, path)
	isAll := missing == path
	path, missing = merge.Brief(path), merge.Brief(missing)
	switch {
	case kind == "test":
		return fmt.Errorf("operation %d: test: %s isn't what the patch expects", i+1, path)
	case missing == "":
		return fmt.Errorf("operation %d: %s %s: %s", i+1, kind, path, merge.Brief(err.Error()))
	}
	if _, isList := parent.([]any); isList {
		return fmt.Errorf("operation %d: %s: there is no %s in the configuration; the list has %d entries, counted from 0, and - is behind the last", i+1, kind, missing, len(parent.([]any)))
	}
	if kind == "remove" {
		return fmt.Errorf("operation %d: remove: there is no %s in the configuration", i+1, missing)
	}
	if isAll {
		return fmt.Errorf("operation %d: %s: there is no %s in the configuration; use add instead of %s", i+1, kind, path, kind)
	}
	return fmt.Errorf("operation %d: %s %s: there is no %s in the configuration; add %s first, with the rest inside of its value", i+1, kind, path, missing, missing)
}

// find follows a JSON pointer as far as it exists. It returns the last value
// that exists, and the pointer to the first one that doesn't, or "".
func find(root any, pointer string) (at any, missing string) {
	at = root
	parts := strings.Split(pointer, "/")
	for i, part := range parts[1:] {
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(part)
		var next any
		found := false
		switch v := at.(type) {
		case map[string]any:
			next, found = v[name]
		case []any:
			if n, err := strconv.Atoi(name); err == nil && n >= 0 && n < len(v) {
				next, found = v[n], true
			}
		}
		if !found {
			return at, strings.Join(parts[:i+2], "/")
		}
		at = next
	}
	return at, ""
}

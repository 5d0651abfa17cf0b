package patch

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/fuzzdata"
	"github.com/garboard-os/garboard/config/tree"
)

func TestCostlyPatches(t *testing.T) {
	operations := func(n int, op string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(op+",", n), ",") + "]"
	}
	times := func(n int, line func(int) string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(line(i))
		}
		return b.String()
	}
	// As much as is allowed.
	keys := func(v int) string {
		return "machine:\n  env:\n" + times(45_000, func(i int) string { return fmt.Sprintf("    k%06d: %d\n", i, v) })
	}
	entries := func(v int) string {
		return "machine:\n  files:\n" + times(18_000, func(i int) string { return fmt.Sprintf("    - {path: /f%d, content: %d}\n", i, v) })
	}
	for name, tt := range map[string]struct{ doc, patch string }{
		"alias bomb in the document":   {fuzzdata.Aliases(), "machine: {type: worker}"},
		"alias bomb in the patch":      {"a: 1\n", fuzzdata.Aliases()},
		"alias to itself":              {"machine: &a\n  network: *a\n", "machine: {type: worker}"},
		"deep document":                {fuzzdata.Filled("machine: ", "[", "\n"), "machine: 1"},
		"deep blocks":                  {fuzzdata.Deep(700), "a: {a: {a: {a: 1}}}"},
		"deep lists":                   {"a: " + strings.Repeat("[", 9000) + strings.Repeat("]", 9000), `[{"op": "add", "path": "/b", "value": 1}]`},
		"deep patch":                   {"a: 1\n", "b: " + strings.Repeat("{a: ", 5000) + "1" + strings.Repeat("}", 5000)},
		"many keys":                    {fuzzdata.Many(func(i int) string { return fmt.Sprintf("k%06d: 1\n", i) }), `[{"op": "replace", "path": "/k000005", "value": 2}]`},
		"most keys merged":             {keys(1), keys(2)},
		"most keys stepped on":         {keys(1), `[{"op": "remove", "path": "/machine/env/k000007"}]`},
		"most keys go":                 {keys(1), strings.ReplaceAll(keys(3), ": 3", ": null")},
		"most entries merged":          {entries(1), entries(2)},
		"most entries go":              {entries(1), strings.ReplaceAll(entries(3), "content: 3", "$patch: delete")},
		"most entries stepped on":      {entries(1), `[{"op": "add", "path": "/machine/files/0", "value": {"path": "/x"}}]`},
		"most operations":              {"a: [1]\n", operations(maxSteps, `{"op": "add", "path": "/a/0", "value": 1}`)},
		"the last of them fails":       {"a: [1]\n", strings.TrimSuffix(operations(maxSteps-1, `{"op": "add", "path": "/a/0", "value": 1}`), "]") + `,{"op": "remove", "path": "/b"}]`},
		"copies of copies":             {"a: {b: 1}\n", operations(200, `{"op": "copy", "from": "/a", "path": "/a/x"}`)},
		"copies of something large":    {fuzzdata.Filled("a: ", "x", "\n"), operations(1000, `{"op": "copy", "from": "/a", "path": "/b"}`)},
		"quotes":                       {"a: 1\n", fuzzdata.Filled("b: \"", `\u0001`, "\"\n")},
		"lines":                        {"a: 1\n", fuzzdata.Filled("b: |\n", "  x\n", "")},
		"comments":                     {fuzzdata.Filled("", "# c\n", "a: 1\n"), "a: 2"},
		"a document of a megabyte":     {fuzzdata.Filled("a: ", "x", "\n"), `{"b": "` + strings.Repeat("y", 1000) + `"}`},
		"a key of a megabyte in JSON":  {"a: 1\n", fuzzdata.Filled(`[{"op": "add", "path": "/`, "x", `", "value": 1}]`)},
		"a path of a megabyte in JSON": {"a: 1\n", fuzzdata.Filled(`[{"op": "add", "path": "`, "/x", `", "value": 1}]`)},
	} {
		t.Run(name, func(t *testing.T) {
			var out []byte
			var err error
			cost := fuzzdata.Bounded(t, func() { out, err = Apply([]byte(tt.doc), []byte(tt.patch)) })
			t.Logf("%d and %d bytes became %d for %.1f: %.80v", len(tt.doc), len(tt.patch), len(out), cost, err)
			if err != nil && len(err.Error()) > 16<<10 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

// FuzzPatch: the result is a document, and an error changes nothing.
func FuzzPatch(f *testing.F) {
	for _, tt := range patches {
		f.Add([]byte(document), []byte(tt.patch))
	}
	f.Add([]byte("a: &x [1, {b: 2}]\nc: *x\n"), []byte(`[{"op": "remove", "path": "/c/1/b"}]`))
	f.Fuzz(func(t *testing.T, doc, patch []byte) {
		before := bytes.Clone(doc)
		out, err := Apply(doc, patch)
		if !bytes.Equal(before, doc) {
			t.Error("the document itself was changed")
		}
		if err != nil {
			if out != nil || err.Error() == "" {
				t.Errorf("%q with error %q", out, err)
			}
			return
		}
		if _, err := tree.Parse(out); err != nil {
			t.Errorf("%q by %q became %q: %v", doc, patch, out, err)
		}
	})
}

// FuzzMerge: to merge a piece of a document into the document changes nothing,
// and to merge the same patch a second time changes nothing either.
func FuzzMerge(f *testing.F) {
	f.Add([]byte(document), []byte("machine: {network: {interfaces: [{interface: wlan0, mtu: 1450}, {interface: a}]}}"))
	f.Add([]byte("machine: {files: [{path: a}, {path: a, op: append}]}"), []byte("machine: {files: [{path: a}, {path: a, op: append}, {path: a}]}"))
	f.Add([]byte("a: 1"), []byte("machine: {files: [{path: }, {path: a}]}"))
	f.Fuzz(func(t *testing.T, doc, patch []byte) {
		root, err := tree.Parse(doc)
		if err != nil || bytes.Contains(doc, []byte("$patch")) || bytes.Contains(patch, []byte("$patch")) || twice(root.Content[0]) {
			return
		}
		if by, err := tree.Parse(patch); err != nil || by.Content[0].Kind != root.Content[0].Kind || twice(by.Content[0]) {
			return
		}
		once, err := Apply(doc, patch)
		if err != nil {
			return
		}
		again, err := Apply(once, patch)
		if err != nil || !bytes.Equal(once, again) {
			t.Errorf("%q by %q became %q, then %q: %v", doc, patch, once, again, err)
		}
		config.Load("fuzz", once)
	})
}

// twice reports whether a mapping has a key twice: config.Load refuses that,
// Apply doesn't.
func twice(n *yaml.Node) bool {
	keys := map[string]bool{}
	for i, inner := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			if keys[inner.Value] || inner.Kind != yaml.ScalarNode {
				return true
			}
			keys[inner.Value] = true
		}
		if twice(inner) {
			return true
		}
	}
	return n.Kind == yaml.AliasNode
}

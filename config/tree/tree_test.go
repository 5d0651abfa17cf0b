package tree

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
	"pgregory.net/rapid"
)

const kitchen = `# about
a: 1 # one

# about b
b:
    c: x
    # about d
    d: |
        # not a comment

        text
    # e: 5

list:
- one # first
- - two
  - three

-   f: 4
    g: "5"
flow: {h: [6, 7], i: 'j'}
# the end
`

// at finds a node: path has keys of mappings and indices of lists.
func at(t testing.TB, n *yaml.Node, path ...any) *yaml.Node {
	t.Helper()
	for _, step := range path {
		switch step := step.(type) {
		case int:
			n = n.Content[step]
		case string:
			found := false
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == step {
					n, found = n.Content[i+1], true
					break
				}
			}
			if !found {
				t.Fatalf("no %s", step)
			}
		}
	}
	return n
}

func set(n *yaml.Node, value string) { *n = *Quoted(value) }

func drop(n *yaml.Node, i, count int) {
	n.Content = append(n.Content[:i:i], n.Content[i+count:]...)
}

func TestText(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*yaml.Node)
		old  string
		new  string
	}{
		{"nothing", func(*yaml.Node) {}, "", ""},
		{"a value", func(n *yaml.Node) { n.Content[1] = &yaml.Node{Kind: yaml.ScalarNode, Value: "2", LineComment: "# one"} }, "a: 1 # one", "a: 2 # one"},
		{"a value further in", func(n *yaml.Node) { set(at(t, n, "b", "c"), "y z") }, "    c: x\n", "    c: y z\n"},
		{"a block", func(n *yaml.Node) { set(at(t, n, "b", "d"), "short") }, "    d: |\n        # not a comment\n\n        text\n", "    d: short\n"},
		{"a new block", func(n *yaml.Node) { set(at(t, n, "b", "c"), "one\ntwo\n") }, "    c: x\n", "    c: |\n        one\n        two\n"},
		{"an entry", func(n *yaml.Node) { set(at(t, n, "list", 0), "1st") }, "- one # first\n", "- 1st\n"},
		{"an entry in a line of two dashes", func(n *yaml.Node) { set(at(t, n, "list", 1, 1), "3") }, "  - three\n", "  - \"3\"\n"},
		{"the first in a line of two dashes", func(n *yaml.Node) { set(at(t, n, "list", 1, 0), "2nd") }, "- - two\n", "- - 2nd\n"},
		{"the first key behind a dash", func(n *yaml.Node) { set(at(t, n, "list", 2, "f"), "x") }, "-   f: 4\n", "-   f: x\n"},
		{"the second key behind a dash", func(n *yaml.Node) { set(at(t, n, "list", 2, "g"), "x") }, "    g: \"5\"\n", "    g: x\n"},
		{"a key goes", func(n *yaml.Node) { drop(n, 0, 2) }, "# about\na: 1 # one\n", ""},
		{"a key with comments goes", func(n *yaml.Node) { drop(at(t, n, "b"), 2, 2) }, "    # about d\n    d: |\n        # not a comment\n\n        text\n", ""},
		{"an entry goes", func(n *yaml.Node) { drop(at(t, n, "list"), 1, 1) }, "- - two\n  - three\n", ""},
		{"a key comes", func(n *yaml.Node) {
			b := at(t, n, "b")
			b.Content = append(b.Content, Quoted("new"), Quoted("5"))
		}, "    # e: 5\n", "    new: \"5\"\n    # e: 5\n"},
		{"flow", func(n *yaml.Node) { set(at(t, n, "flow", "h", 0), "x") }, "flow: {h: [6, 7], i: 'j'}", "flow: {h: [x, 7], i: 'j'}"},
		{"a comment", func(n *yaml.Node) { at(t, n, "b").Content[2].HeadComment = "# now d" }, "    # about d\n", "    # now d\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			doc, err := Parse([]byte(kitchen))
			if err != nil {
				t.Fatal(err)
			}
			tt.edit(doc.Content[0])
			got, err := Text([]byte(kitchen), doc)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Replace(kitchen, tt.old, tt.new, 1), string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// After any change the text has the content of the tree, and no line that isn't
// part of the change is lost.
func TestAnyEdit(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		doc, err := Parse([]byte(kitchen))
		if err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(1, 4).Draw(rt, "edits") {
			edit(rt, doc.Content[0])
		}
		got, err := Text([]byte(kitchen), doc)
		if err != nil {
			rt.Fatal(err)
		}
		was, err := Parse([]byte(kitchen))
		if err != nil {
			rt.Fatal(err)
		}
		if !reads(got, doc, commentsOf(doc, was)) {
			rt.Fatalf("%s", got)
		}
	})
}

// edit changes one node somewhere in a collection.
func edit(t *rapid.T, n *yaml.Node) {
	width := 1
	if n.Kind == yaml.MappingNode {
		width = 2
	}
	if len(n.Content) == 0 {
		return
	}
	i := rapid.IntRange(0, len(n.Content)/width-1).Draw(t, "which") * width
	value := n.Content[i+width-1]
	word := Quoted(rapid.SampledFrom([]string{"x", "", "0", "# c", "two\nlines\n", " a: b ", "-", "true"}).Draw(t, "value"))
	switch what := rapid.SampledFrom([]string{"inside", "inside", "set", "drop", "append", "insert"}).Draw(t, "what"); {
	case what == "inside" && value.Kind != yaml.ScalarNode:
		edit(t, value)
	case what == "drop":
		drop(n, i, width)
	case what == "append" || what == "insert":
		entry := []*yaml.Node{word}
		if width == 2 {
			entry = []*yaml.Node{Quoted("new" + rapid.StringMatching("[a-z]{8}").Draw(t, "key")), word}
		}
		at := len(n.Content)
		if what == "insert" {
			at = i
		}
		n.Content = append(append(append([]*yaml.Node{}, n.Content[:at]...), entry...), n.Content[at:]...)
	default:
		n.Content[i+width-1] = word
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"": "is empty", " \n": "is empty", "# c\n": "is empty", "a: 1\n---\nb: 2\n": "line 2: holds more than one YAML document; a configuration is one",
		"a: \x00": "line 1: holds a zero byte: this is not a text file", "a:\n\tb: 1\n": "line 2: not valid YAML: found character that cannot start any token; YAML is indented with spaces, not with tabs",
		strings.Repeat("#", MaxSize+1):              "has 1048577 bytes, more than the 1048576 that a configuration may have",
		"[" + strings.Repeat("1,", maxNodes) + "1]": "holds more than the 100000 values that a configuration may have",
		strings.Repeat("[", 20000):                  "line 1: not valid YAML: exceeded max depth of 10000",
	} {
		_, err := Parse([]byte(text))
		if err == nil || err.Error() != want {
			t.Errorf("%.20q: %v, want %s", text, err, want)
		}
	}
}

func TestExpand(t *testing.T) {
	doc, err := Parse([]byte("a: &a {b: &b [1], c: *b}\nd: *a\ne: [*b, *a]\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Expand(doc); err != nil {
		t.Fatal(err)
	}
	set(at(t, doc.Content[0], "d", "b", 0), "x")
	text, err := Text([]byte("a: 1\n"), doc)
	if err != nil {
		t.Fatal(err)
	}
	if want := "a: {b: [1], c: [1]}\nd: {b: [x], c: [1]}\ne: [[1], {b: [1], c: [1]}]\n"; string(text) != want {
		t.Errorf("%s", text)
	}
}

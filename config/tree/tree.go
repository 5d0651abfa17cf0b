// Package tree holds the text of a YAML document while its values change. Users
// write comments, blank lines and quotes into a configuration, and a patch or
// an edit must not change them: Text rewrites only the lines whose values
// changed.
package tree

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// MaxSize is the largest document, in bytes. A real one has about 10 KiB, 100
// KiB with inline manifests; the limit keeps malicious ones cheap.
const MaxSize = 1 << 20

// Error is the reason why a text is no document. Line and Column count from 1;
// they are 0 if the whole document is wrong.
type Error struct {
	Line, Column int
	What         string
	// Refused: the text wasn't parsed, because it is too large, empty, or no text.
	Refused bool
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.What
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.What)
}

func failed(line, column int, format string, args ...any) *Error {
	return &Error{Line: line, Column: column, What: fmt.Sprintf(format, args...)}
}

func refused(line, column int, format string, args ...any) *Error {
	err := failed(line, column, format, args...)
	err.Refused = true
	return err
}

// syntaxError matches the positions in errors of yaml.v3.
var syntaxError = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// Parse makes the tree of nodes of a text that is one YAML document: a node of
// kind DocumentNode with one node inside. It takes less than a second for any
// text; aliases aren't followed. The error is of type *Error.
func Parse(text []byte) (*yaml.Node, error) {
	if err := refuse(text); err != nil {
		return nil, err
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, failed(0, 0, "is empty")
		}
		m := syntaxError.FindStringSubmatch(err.Error())
		line, _ := strconv.Atoi(m[1])
		what := m[2]
		if strings.Contains(what, "cannot start any token") {
			what += "; YAML is indented with spaces, not with tabs"
		}
		return nil, failed(max(line, 1), 1, "not valid YAML: %s", what)
	}
	var second yaml.Node
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		return nil, failed(max(second.Line, 1), max(second.Column, 1), "holds more than one YAML document; a configuration is one")
	}
	if count(&doc, maxNodes) < 0 {
		return nil, failed(0, 0, "holds more than the %d values that a configuration may have", maxNodes)
	}
	return &doc, nil
}

// maxNodes limits keys, values, lists and mappings: a hundred times the size of a
// real document, and few enough for code that goes through all of them several times.
const maxNodes = 100_000

// count is left minus the nodes of a tree, negative if there are more of them
// than left.
func count(n *yaml.Node, left int) int {
	left--
	for _, inner := range n.Content {
		if left = count(inner, left); left < 0 {
			break
		}
	}
	return left
}

func tooLarge(text []byte) *Error {
	return refused(0, 0, "has %d bytes, more than the %d that a configuration may have", len(text), MaxSize)
}

// refuse finds texts that must not be parsed.
func refuse(text []byte) *Error {
	if len(text) > MaxSize {
		return tooLarge(text)
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return refused(0, 0, "is empty")
	}
	if i := bytes.IndexByte(text, 0); i >= 0 {
		return refused(bytes.Count(text[:i], []byte("\n"))+1, i-bytes.LastIndexByte(text[:i], '\n'), "holds a zero byte: this is not a text file")
	}
	return nil
}

// maxExpanded limits the size of a document with its aliases expanded, in bytes of text.
const maxExpanded = 2 * MaxSize

// Expand replaces every alias by a copy of its node, so that each place in the
// document can change alone. Documents without aliases stay as they are.
func Expand(doc *yaml.Node) error {
	e := expansion{nodes: maxNodes, bytes: maxExpanded, open: map[*yaml.Node]bool{}}
	if err := e.expand(doc); err != nil {
		return err
	}
	if e.any {
		dropAnchors(doc)
	}
	return nil
}

type expansion struct {
	nodes, bytes int                 // remaining, of the limits
	open         map[*yaml.Node]bool // nodes that are being expanded, or copied
	any          bool                // there were aliases
}

func (e *expansion) expand(n *yaml.Node) error {
	e.nodes--
	e.bytes -= len(n.Value)
	if e.nodes < 0 || e.bytes < 0 {
		return failed(0, 0, "holds more than %d values or %d bytes with its aliases written out", maxNodes, maxExpanded)
	}
	for i, inner := range n.Content {
		target := inner
		if inner.Kind == yaml.AliasNode {
			target, e.any = inner.Alias, true
		}
		if e.open[target] {
			return failed(inner.Line, inner.Column, "the alias *%s stands for what it is inside of", inner.Value)
		}
		if target != inner || n.Line == 0 { // an alias, or inside of a copy
			copied := *target
			copied.Content = slices.Clone(target.Content)
			copied.Anchor, copied.Line, copied.Column = "", 0, 0
			copied.HeadComment, copied.LineComment, copied.FootComment = inner.HeadComment, inner.LineComment, inner.FootComment
			n.Content[i] = &copied
		}
		e.open[target] = true
		if err := e.expand(n.Content[i]); err != nil {
			return err
		}
		delete(e.open, target)
	}
	return nil
}

func dropAnchors(n *yaml.Node) {
	n.Anchor = ""
	for _, inner := range n.Content {
		dropAnchors(inner)
	}
}

// Field is the value of a key in a mapping, or nil.
func Field(n *yaml.Node, key string) *yaml.Node {
	if i := IndexOf(n, key); i >= 0 {
		return n.Content[i+1]
	}
	return nil
}

// IndexOf is the index of a key in the content of a mapping, or -1.
func IndexOf(n *yaml.Node, key string) int {
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return i
			}
		}
	}
	return -1
}

// IsNull reports whether a node has no value.
func IsNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

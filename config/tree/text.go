package tree

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"gopkg.in/yaml.v3"
)

// Text writes doc. doc is a tree that Parse made of the text; its nodes may
// have been replaced, added and removed since. Nodes must not be shared, and a
// value that changes must be a new node. If the result doesn't read back as
// doc, it is an error.
func Text(text []byte, doc *yaml.Node) ([]byte, error) {
	was, err := Parse(text)
	if err != nil {
		return nil, err
	}
	known := commentsOf(doc, was)
	if out, ok := splice(text, doc, was); ok {
		if len(out) > MaxSize {
			return nil, tooLarge(out)
		}
		if bytes.Equal(out, text) || reads(out, doc, known) {
			return out, nil
		}
	}
	for _, style := range []func(*yaml.Node) *yaml.Node{asIs, Plain} {
		out, err := Encode(style(doc), indent(text))
		if err != nil {
			return nil, err
		}
		if len(out) > MaxSize {
			return nil, tooLarge(out)
		}
		if reads(out, doc, known) {
			return out, nil
		}
	}
	return nil, errors.New("can't be written so that it reads back the same")
}

// commentsOf are the lines of comments that the text of doc may contain: its
// own, and those of the old text if none of them was changed. A comment may
// have been changed to remove a secret.
func commentsOf(doc, was *yaml.Node) map[string]bool {
	before, now := map[string]bool{}, map[string]bool{}
	eachComment(was, func(line string) { before[line] = true })
	changed := false
	eachComment(doc, func(line string) {
		now[line] = true
		changed = changed || !before[line]
	})
	if changed {
		return now
	}
	return before
}

// reads reports whether a text reads back as doc, with known comments only.
func reads(text []byte, doc *yaml.Node, known map[string]bool) bool {
	again, err := Parse(text)
	if err != nil || !Equal(doc, again) {
		return false
	}
	same := true
	eachComment(again, func(line string) { same = same && known[line] })
	return same
}

// eachComment calls f with the lines of all comments.
func eachComment(n *yaml.Node, f func(string)) {
	for _, comment := range []string{n.HeadComment, n.LineComment, n.FootComment} {
		for line := range strings.Lines(comment) {
			f(strings.TrimSpace(line))
		}
	}
	for _, inner := range n.Content {
		eachComment(inner, f)
	}
}

// Encode writes a value with an indentation of that many spaces.
func Encode(value any, spaces int) (out []byte, err error) {
	defer func() {
		// The encoder panics if nodes and comments contradict each other.
		if r := recover(); r != nil {
			out, err = nil, fmt.Errorf("can't be written: %v", r)
		}
	}()
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(spaces)
	if err := errors.Join(enc.Encode(value), enc.Close()); err != nil {
		return nil, fmt.Errorf("can't be written: %w", err)
	}
	return b.Bytes(), nil
}

func asIs(n *yaml.Node) *yaml.Node { return n }

// Plain is a copy without comments, in the usual style, and with quotes around everything that
// isn't one simple line: some comments and some blocks read back as something
// else after the encoder has written them.
func Plain(n *yaml.Node) *yaml.Node {
	c := *n
	c.HeadComment, c.LineComment, c.FootComment = "", "", ""
	if c.Style &= yaml.TaggedStyle; c.Kind == yaml.ScalarNode && c.ShortTag() == "!!str" {
		c.Style |= Quoted(c.Value).Style
	}
	c.Content = make([]*yaml.Node, len(n.Content))
	for i, inner := range n.Content {
		c.Content[i] = Plain(inner)
	}
	return &c
}

// Equal reports whether two trees have the same content, whatever their style.
func Equal(a, b *yaml.Node) bool {
	if a.Kind != b.Kind || a.Anchor != b.Anchor {
		return false
	}
	if a.Kind == yaml.ScalarNode && (a.Value != b.Value || a.ShortTag() != b.ShortTag()) || a.Kind == yaml.AliasNode && a.Value != b.Value {
		return false
	}
	return slices.EqualFunc(a.Content, b.Content, Equal)
}

// Quoted makes the node of a text. The encoder quotes it if it would read back
// as something else. For text of several lines the encoder writes blocks, which
// don't read back if they contain unusual blanks: Quoted quotes those itself.
func Quoted(s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
	if strings.ContainsFunc(s, unicode.IsControl) || strings.ContainsFunc(s, unicode.IsSpace) {
		if n.Style = yaml.DoubleQuotedStyle; blockText.MatchString(s) {
			n.Style = yaml.LiteralStyle
		} else if plainWords.MatchString(s) {
			n.Style = 0
		}
	}
	return n
}

var (
	// blockText is lines of visible characters, with blanks before and between them only.
	blockText = regexp.MustCompile(`^[!-~](([ -~\t]*[!-~])?\n+ *[!-~])*([ -~\t]*[!-~])?\n+$`)
	// plainWords matches one line of words.
	plainWords = regexp.MustCompile(`^[!-~]+( [!-~]+)*$`)
)

const (
	// usualIndent is the indentation for a text that has none, in spaces.
	usualIndent = 2
	// maxIndent is the widest indentation that the encoder writes.
	maxIndent = 9
)

// firstIndent matches the first line that is deeper than the one before it.
var firstIndent = regexp.MustCompile(`(?m)^[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*( +)[^\s#]`)

// indent is the indentation of a text, in spaces.
func indent(text []byte) int {
	m := firstIndent.FindSubmatch(text)
	if m == nil {
		return usualIndent
	}
	return min(max(len(m[1]), usualIndent), maxIndent)
}

package config

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// maxProblems limits the report: more is not useful, and a malicious document
// must not cause a large output.
const maxProblems = 50

// Problem is one thing that is wrong with a document, and its position. Line
// and Column count from 1; they are 0 if the Config has no document.
type Problem struct {
	Name         string // of the document, such as a file name
	Line, Column int
	Path         string // such as machine.network.interfaces[0].cidr
	What         string

	missing bool // a required field isn't there
}

func (p Problem) String() string {
	document := p.Name
	if document != "" && p.Line > 0 {
		document += fmt.Sprintf(":%d:%d", p.Line, p.Column)
	}
	parts := []string{document, p.Path, p.What}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ": ")
}

// Problems is the error of Load: everything that is wrong, in the order of the
// document, one problem per line.
type Problems []Problem

func (ps Problems) Error() string { return Joined(ps, "\n") }

// Warning is about something that is accepted, but that the author of the document should know.
type Warning struct{ Problem }

// place is a path in the document: field names and map keys (string), list
// indices (int), and keys of list entries (entry).
type place []any

func at(elems ...any) place { return elems }

// fieldsAt is the place of a field, by the names on the way to it.
func fieldsAt(path []string) (p place) {
	for _, name := range path {
		p = p.with(name)
	}
	return p
}

// with is p extended, with its own memory.
func (p place) with(elems ...any) place {
	return append(p[:len(p):len(p)], elems...)
}

func (p place) String() string {
	var b strings.Builder
	for i, e := range p {
		text := fmt.Sprint(e)
		plain := len(text) <= maxQuoted && plainKey.MatchString(text)
		if !plain {
			text = quote(text)
		}
		switch _, field := e.(string); {
		case !field || !plain:
			b.WriteString("[" + text + "]")
		case i > 0:
			b.WriteString("." + text)
		default:
			b.WriteString(text)
		}
	}
	return b.String()
}

var plainKey = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// maxQuoted is the longest part of the user's text that a message repeats, in
// bytes: enough to find it again.
const maxQuoted = 60

func quote(s string) string { return strconv.Quote(Shorten(s, maxQuoted)) }

// Shorten is the beginning of a text that is longer than so many bytes, for a message.
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// report collects problems and warnings and finds the position of a path in the
// document.
type report struct {
	name     string
	root     *yaml.Node // nil for a Config without a document
	problems Problems
	warnings []Warning
}

func (r *report) full() bool { return len(r.problems) >= maxProblems }

// badNode reports a problem at the current place of the decoder.
func (r *report) badNode(n *yaml.Node, p place, format string, args ...any) {
	if !r.full() {
		r.problems = append(r.problems, Problem{Name: r.name, Line: n.Line, Column: n.Column, Path: p.String(), What: fmt.Sprintf(format, args...)})
	}
}

// bad reports a problem of a decoded value. If the value, or the value that
// contains it, couldn't be decoded, there is a better message already.
func (r *report) bad(p place, format string, args ...any) {
	r.add(p, false, fmt.Sprintf(format, args...))
}

// refuse reports a problem of a decoded value, if it has one.
func (r *report) refuse(p place, err error) {
	if err != nil {
		r.bad(p, "%v", err)
	}
}

// lacks reports that a required field is missing.
func (r *report) lacks(p place, why string) {
	what := "is missing"
	if why != "" {
		what += ": " + why
	}
	r.add(p, true, what)
}

func (r *report) add(p place, missing bool, what string) {
	if r.full() {
		return
	}
	text := p.String()
	for _, old := range r.problems {
		if rest, ok := strings.CutPrefix(text, old.Path); ok && old.Path != "" && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return
		}
	}
	_, line, column := r.locate(p)
	r.problems = append(r.problems, Problem{Name: r.name, Line: line, Column: column, Path: text, What: what, missing: missing})
}

func (r *report) warn(p place, format string, args ...any) {
	if len(r.warnings) >= maxProblems {
		return
	}
	_, line, column := r.locate(p)
	r.warnings = append(r.warnings, Warning{Problem{Name: r.name, Line: line, Column: column, Path: p.String(), What: fmt.Sprintf(format, args...)}})
}

// point is a place for a message about another place.
func (r *report) point(p place) string {
	if _, line, _ := r.locate(p); line > 0 {
		return fmt.Sprintf("%s, line %d", p, line)
	}
	return p.String()
}

// locate finds p, or the nearest node that would contain it.
func (r *report) locate(p place) (n *yaml.Node, line, column int) {
	n = r.root
	if n == nil {
		return nil, 0, 0
	}
	line, column = n.Line, n.Column
	for _, e := range p {
		n = resolve(n)
		var next *yaml.Node
		switch e := e.(type) {
		case int:
			if n.Kind == yaml.SequenceNode && e < len(n.Content) {
				next = n.Content[e]
				line, column = next.Line, next.Column
			} else if e == 0 {
				continue // a mapping that was accepted for a list of one
			}
		case string:
			for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
				if key := n.Content[i]; key.Value == e || renamed[key.Value] == e {
					next = n.Content[i+1]
					line, column = key.Line, key.Column
				}
			}
		}
		if next == nil {
			break
		}
		n = next
	}
	return n, line, column
}

// resolve follows an alias to its node.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		return n.Alias
	}
	return n
}

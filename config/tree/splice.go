package tree

import (
	"bytes"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// splicer writes a changed tree by lines: lines of unchanged nodes are copied
// from the text, changed nodes are encoded. It works on block style, where
// every key and every dash begins a line; a node in another style is encoded as
// a whole.
//
//	from ┌ # lead: blank lines and comments, no deeper than the key
//	     │ key:
//	     │   … region of the value …
//	     │ next: …
//	 end └ # tail: blank lines and comments at the end of the region
type splicer struct {
	lines  [][]byte
	spaces int // of one step of indentation
	crlf   bool
	out    bytes.Buffer
}

// splice is the text of doc. was is the tree of the old text. The result is
// false if all of doc has to be encoded.
func splice(text []byte, doc, was *yaml.Node) ([]byte, bool) {
	if !alike(doc, was) {
		return nil, false
	}
	if untouched(doc.Content[0], was.Content[0]) {
		return text, true
	}
	if text[len(text)-1] != '\n' {
		text = append(bytes.Clone(text), '\n')
	}
	s := splicer{lines: bytes.SplitAfter(text, []byte("\n")), spaces: indent(text), crlf: bytes.Contains(text, []byte("\r\n"))}
	s.lines = s.lines[:len(s.lines)-1] // the part after the final newline
	ok := s.node(doc.Content[0], was.Content[0], 0, len(s.lines))
	return s.out.Bytes(), ok
}

// alike compares two nodes without their content.
func alike(n, was *yaml.Node) bool {
	return n.Kind == was.Kind && n.Line == was.Line && n.Column == was.Column && n.Style == was.Style && n.Tag == was.Tag && n.Value == was.Value && n.Anchor == was.Anchor &&
		n.HeadComment == was.HeadComment && n.LineComment == was.LineComment && n.FootComment == was.FootComment
}

// untouched compares two nodes with all of their content.
func untouched(n, was *yaml.Node) bool {
	return alike(n, was) && slices.EqualFunc(n.Content, was.Content, untouched)
}

// node writes a mapping or list in block style in the given region of lines, or
// reports that it can't. In that case it may have written a part.
func (s *splicer) node(n, was *yaml.Node, from, end int) bool {
	if !alike(n, was) || len(n.Content) == 0 || len(was.Content) == 0 || n.Style&yaml.FlowStyle != 0 {
		return false
	}
	width := 1
	if n.Kind == yaml.MappingNode {
		width = 2
	}
	col := was.Column - 1
	parts, ok := s.parts(was, width, col, from, end)
	if !ok {
		return false
	}
	tail := end
	for tail > parts[len(parts)-1].start+1 && s.isOutside(tail-1, col) {
		tail--
	}
	parts[len(parts)-1].end = tail
	byPlace := make(map[place]int, len(parts))
	for i, p := range parts {
		byPlace[placeOf(p.was[0])] = i
	}
	for j := 0; j < len(n.Content); j += width {
		now := n.Content[j : j+width]
		i, known := byPlace[placeOf(now[0])]
		// The first part may be on the same line as the dash of a list around it.
		if !known || now[0].Line == 0 {
			if j == 0 && parts[0].inline || !s.render(now, col) {
				return false
			}
		} else if (j == 0) != (i == 0) && parts[0].inline || !s.part(now, parts[i], col) {
			return false
		}
	}
	for _, line := range s.lines[tail:end] {
		s.out.Write(line)
	}
	return true
}

type place struct {
	line, column int
	kind         yaml.Kind
}

func placeOf(n *yaml.Node) place { return place{n.Line, n.Column, n.Kind} }

// part is a key with its value, or an entry of a list, and its lines: lead and
// start are the first line, with and without its comments; end is the line
// after the last.
type part struct {
	was              []*yaml.Node
	lead, start, end int
	inline           bool // it isn't at the beginning of its line
}

// parts finds the lines of the parts of a collection.
func (s *splicer) parts(was *yaml.Node, width, col, from, end int) ([]part, bool) {
	parts := make([]part, 0, len(was.Content)/width)
	for i := 0; i < len(was.Content); i += width {
		p := part{was: was.Content[i : i+width], start: was.Content[i].Line - 1, end: end, lead: from}
		if p.start < from || p.start >= end || len(s.lines[p.start]) <= col {
			return nil, false
		}
		line := s.lines[p.start]
		if width == 2 && was.Content[i].Column-1 != col || width == 1 && line[col] != '-' {
			return nil, false
		}
		prefix := string(line[:col])
		p.inline = strings.Trim(prefix, " ") != ""
		if p.inline && (i > 0 || strings.Trim(prefix, " -") != "") {
			return nil, false
		}
		if i > 0 {
			before := &parts[len(parts)-1]
			if p.start <= before.start {
				return nil, false
			}
			for p.lead = p.start; p.lead-1 > before.start && s.isOutside(p.lead-1, col); p.lead-- {
			}
			before.end = p.lead
		}
		parts = append(parts, p)
	}
	return parts, true
}

// isOutside reports whether a line is blank, or a comment that isn't deeper
// than a column and so can't be inside of the node at that column.
func (s *splicer) isOutside(line, col int) bool {
	text := bytes.TrimLeft(s.lines[line], " ")
	depth := len(s.lines[line]) - len(text)
	text = bytes.TrimSpace(text)
	return len(text) == 0 || text[0] == '#' && depth <= col
}

// part writes a part that existed before.
func (s *splicer) part(now []*yaml.Node, p part, col int) bool {
	if slices.EqualFunc(now, p.was, untouched) {
		s.copy(p.lead, p.end)
		return true
	}
	before := s.out.Len()
	value, was := now[len(now)-1], p.was[len(p.was)-1]
	if len(now) == 1 { // an entry begins on the line of its dash
		s.copy(p.lead, p.start)
		if s.node(value, was, p.start, p.end) {
			return true
		}
	} else if alike(now[0], p.was[0]) && was.Line-1 > p.start {
		s.copy(p.lead, p.start+1)
		if s.node(value, was, p.start+1, p.end) {
			return true
		}
	}
	s.out.Truncate(before)
	head := now[0]
	if head.FootComment != p.was[0].FootComment {
		return false
	}
	comments := *head
	comments.FootComment = ""
	if head.HeadComment == p.was[0].HeadComment {
		comments.HeadComment = ""
		s.copy(p.lead, p.start)
	} else if p.inline {
		return false
	} else {
		for i := p.lead; i < p.start; i++ {
			if len(bytes.TrimSpace(s.lines[i])) == 0 {
				s.copy(i, i+1)
			}
		}
	}
	mark := s.out.Len()
	if !s.render(append([]*yaml.Node{&comments}, now[1:]...), col) {
		return false
	}
	copy(s.out.Bytes()[mark:], s.lines[p.start][:col]) // the dash of a list around it
	return true
}

func (s *splicer) copy(from, end int) {
	for _, line := range s.lines[from:end] {
		s.out.Write(line)
	}
}

// render encodes a key with its value, or an entry of a list, at a column.
func (s *splicer) render(now []*yaml.Node, col int) bool {
	kind := yaml.SequenceNode
	if len(now) == 2 {
		kind = yaml.MappingNode
	}
	text, err := Encode(&yaml.Node{Kind: kind, Content: now}, s.spaces)
	if err != nil {
		return false
	}
	margin := bytes.Repeat([]byte(" "), col)
	for line := range bytes.Lines(text) {
		if len(bytes.TrimSpace(line)) > 0 {
			s.out.Write(margin)
		}
		if text, ended := bytes.CutSuffix(line, []byte("\n")); ended && s.crlf {
			s.out.Write(text)
			line = []byte("\r\n")
		}
		s.out.Write(line)
	}
	return true
}

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// MaxSize is the largest document, in bytes.
const MaxSize = tree.MaxSize

// Load reads a document strictly and fills the defaults in. name is the
// document's name in problems, such as a file name or URL. The error is of type
// Problems and has everything that is wrong; warnings about deprecated
// spellings are returned with it.
func Load(name string, data []byte) (*Config, []Warning, error) {
	return loadWith(name, data, warningChecks)
}

// LoadForContainer is Load for a node in a container. It also warns of what only machines do.
func LoadForContainer(name string, data []byte) (*Config, []Warning, error) {
	return loadWith(name, data, append(slices.Clip(warningChecks), warnContainer))
}

func loadWith(name string, data []byte, warn []check) (*Config, []Warning, error) {
	r := &report{name: name}
	if problems, refused := r.parse(data); refused {
		return nil, nil, problems
	} else if problems != nil {
		return nil, nil, r.truncated(data, problems)
	}
	c := &Config{}
	d := &decoder{report: r, budget: maxExpanded}
	d.document(c)
	if !r.full() && d.budget >= 0 { // otherwise only a part was decoded
		normalize(c, r)
		c.FillDefaults()
		for _, check := range checks {
			check(c, r)
		}
	}
	if len(r.problems) == 0 {
		for _, check := range warn {
			check(c, r)
		}
	}
	slices.SortStableFunc(r.warnings, func(a, b Warning) int { return inOrder(a.Problem, b.Problem) })
	if len(r.problems) > 0 {
		slices.SortStableFunc(r.problems, inOrder)
		if r.full() {
			r.problems = append(r.problems, Problem{Name: name, What: fmt.Sprintf("further problems aren't listed: these are the first %d", maxProblems)})
		}
		return nil, r.warnings, r.truncated(data, r.problems)
	}
	return c, r.warnings, nil
}

// inOrder is the order of the document; of one place, what is missing there comes first.
func inOrder(a, b Problem) int {
	rank := map[bool]int{true: 0, false: 1}
	return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(rank[a.missing], rank[b.missing]))
}

// parse makes the tree of nodes: one document with a mapping at its top. After
// a problem here there is nothing else to check; refused reports that the
// document wasn't parsed at all.
func (r *report) parse(data []byte) (problems Problems, refused bool) {
	doc, err := tree.Parse(data)
	if at := new(tree.Error); errors.As(err, &at) {
		return Problems{{Name: r.name, Line: at.Line, Column: at.Column, What: at.What}}, at.Refused
	}
	r.root = doc.Content[0]
	if r.root.Kind != yaml.MappingNode {
		return Problems{{Name: r.name, Line: r.root.Line, Column: r.root.Column, What: fmt.Sprintf("is %s, not a mapping that starts with version, machine and cluster", kindOf(r.root))}}, false
	}
	return nil, false
}

// truncated makes one problem of all problems of a document that was cut off: a
// list of consequences would hide the cause. A document was probably cut off in
// two cases: it doesn't end with a newline and something is missing or broken
// at its end; or it ends with one, and all problems are about missing things.
func (r *report) truncated(data []byte, problems Problems) error {
	lines := bytes.Count(data, []byte("\n"))
	if !bytes.HasSuffix(data, []byte("\n")) {
		last := Problem{Name: r.name, Line: lines + 1, Column: len(data) - bytes.LastIndexByte(data, '\n')}
		var rest, consequences Problems
		for _, p := range problems {
			if p.missing || p.Line >= last.Line || r.root == nil {
				consequences = append(consequences, p)
			} else {
				rest = append(rest, p)
			}
		}
		if len(consequences) == 0 {
			return problems
		}
		first := consequences[0]
		first.Name = fmt.Sprintf("line %d", first.Line)
		first.Line = 0
		last.What = fmt.Sprintf("ends in the middle of a line, after %d bytes, so it is probably truncated; first consequence: %s", len(data), first)
		return append(rest, last)
	}
	var lacking []string
	for _, p := range problems {
		if p.missing {
			lacking = append(lacking, p.Path)
		}
	}
	if len(lacking) < len(problems) || len(lacking) == 1 {
		return problems
	}
	return Problems{{Name: r.name, Line: lines, Column: 1, What: fmt.Sprintf("ends here without %s: is it truncated?", strings.Join(lacking, ", "))}}
}

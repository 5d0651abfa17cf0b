package config

import (
	"bytes"
	"cmp"
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
// KiB with inline manifests; the bound keeps hostile ones cheap.
const MaxSize = 1 << 20

// Load reads a document strictly and fills the defaults in. name is what
// problems call it, such as a file name or URL. The error is of type Problems
// and holds everything that is wrong; deprecated spellings are warned about
// even then.
func Load(name string, data []byte) (*Config, []Warning, error) {
	r := &report{name: name}
	if err := r.refuse(data); err != nil {
		return nil, nil, err
	}
	if err := r.parse(data); err != nil {
		return nil, nil, r.truncated(data, err)
	}
	c := &Config{}
	d := &decoder{report: r, budget: maxExpanded}
	d.document(c)
	if !r.full() && d.budget >= 0 { // else what was decoded is a part only
		normalize(c, r)
		c.FillDefaults()
		for _, check := range checks {
			check.run(c, r)
		}
	}
	if len(r.problems) == 0 {
		for _, check := range cautions {
			check.run(c, r)
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

func inOrder(a, b Problem) int {
	return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
}

// syntaxError is how yaml.v3 gives places.
var syntaxError = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// fail makes the one problem after which there is nothing to look at.
func (r *report) fail(line, column int, format string, args ...any) Problems {
	return Problems{{Name: r.name, Line: line, Column: column, What: fmt.Sprintf(format, args...)}}
}

// refuse looks at what isn't worth parsing. Its result is nil or Problems.
func (r *report) refuse(data []byte) error {
	if len(data) > MaxSize {
		return r.fail(0, 0, "has %d bytes, more than the %d that a configuration may have", len(data), MaxSize)
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return r.fail(0, 0, "is empty")
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return r.fail(bytes.Count(data[:i], []byte("\n"))+1, i-bytes.LastIndexByte(data[:i], '\n'), "holds a zero byte: this is not a text file")
	}
	return nil
}

// parse makes the tree of nodes: one document with a mapping at its top.
func (r *report) parse(data []byte) Problems {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return r.fail(0, 0, "is empty")
		}
		m := syntaxError.FindStringSubmatch(err.Error())
		line, _ := strconv.Atoi(m[1])
		what := m[2]
		if strings.Contains(what, "cannot start any token") {
			what += "; YAML is indented with spaces, not with tabs"
		}
		return r.fail(max(line, 1), 1, "not valid YAML: %s", what)
	}
	var second yaml.Node
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		return r.fail(max(second.Line, 1), max(second.Column, 1), "holds more than one YAML document; a configuration is one")
	}
	r.root = doc.Content[0]
	if r.root.Kind != yaml.MappingNode {
		return r.fail(r.root.Line, r.root.Column, "is %s, not a mapping that starts with version, machine and cluster", kindOf(r.root))
	}
	return nil
}

// truncated makes one problem of what follows from a document having been cut
// off: a list of consequences would hide the cause. It was cut off, probably,
// where it doesn't end with a line's end and something is missing or broken at
// its end, or where it ends well, but all that is wrong is that things are missing.
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

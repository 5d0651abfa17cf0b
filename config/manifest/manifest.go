// Package manifest reads Kubernetes objects from text, and takes what kubectl takes: documents of YAML 1.1 or JSON
// between lines that begin with "---". Keys become text, dates stay text, yes, no, on and off are booleans, and lists
// are taken apart. Each document stands alone: one that is wrong doesn't keep the others from being read.
package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	yaml12 "gopkg.in/yaml.v3"
	"sigs.k8s.io/yaml"
)

// Problem is what is wrong with a document. Line counts from 1.
type Problem struct {
	Line int
	What string
}

func (p Problem) String() string { return fmt.Sprintf("line %d: %s", p.Line, p.What) }

var (
	newline   = []byte("\n")
	separator = regexp.MustCompile(`(?m)^---(?:[ \t]*(?:#.*)?\r?$| )`)
	// mistyped is a line that is meant to be a separator, and is none.
	mistyped = regexp.MustCompile(`(?m)^(?:-{2}|-{4,})[ \t\r]*$`)
	content  = regexp.MustCompile(`(?m)^[^#\s]`)
	position = regexp.MustCompile(`^(?:yaml: )?\s*(?:line (\d+): )?(.*)`) // and text of an error
)

// Read returns the objects of all documents, and what is wrong with the others.
func Read(text []byte) (objects []map[string]any, problems []Problem) {
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // the mark of UTF-8
	begin, line := 0, 1
	for _, end := range append(separator.FindAllIndex(text, -1), []int{len(text), len(text)}) {
		document := text[begin:end[0]]
		found, wrong := read(document, line)
		objects, problems = append(objects, found...), append(problems, wrong...)
		begin, line = end[1], line+bytes.Count(document, newline)
	}
	return objects, problems
}

// read reads what is between two separators, which begins at a line.
func read(text []byte, first int) (objects []map[string]any, problems []Problem) {
	begin := first + bytes.Count(text[:append(content.FindIndex(text), 0)[0]], newline)
	values, err := decode(text)
	if err != nil {
		for what := range strings.SplitSeq(strings.TrimPrefix(err.Error(), "yaml: unmarshal errors:\n"), "\n") {
			m := position.FindStringSubmatch(what)
			line, err := strconv.Atoi(m[1])
			if line += first - 1; err != nil {
				line = begin
			}
			problems = append(problems, Problem{line, "not valid YAML: " + m[2]})
		}
	}
	for _, v := range values {
		takeApart(v, func(o map[string]any, problem string) {
			if problem == "" {
				objects = append(objects, o)
			} else {
				problems = append(problems, Problem{begin, problem})
			}
		})
	}
	if at := mistyped.FindIndex(text); at != nil && len(problems) > 0 {
		what := fmt.Sprintf("%q separates no documents, as \"---\" does; %s", bytes.TrimSpace(text[at[0]:at[1]]), problems[0].What)
		problems[0] = Problem{first + bytes.Count(text[:at[0]], newline), what}
	}
	return objects, problems
}

// decode decodes one document of YAML, or several of JSON. A key that is there twice is an error.
func decode(text []byte) (values []any, err error) {
	data, err := yaml.YAMLToJSONStrict(text)
	if d, rest := yaml12.NewDecoder(bytes.NewReader(text)), new(yaml12.Node); err == nil && d.Decode(rest) == nil && !errors.Is(d.Decode(rest), io.EOF) {
		err = errors.New("more than one document without \"---\" between them")
	}
	if err == nil {
		values = []any{nil}
		if yaml12.Unmarshal(data, &values[0]) == nil { // it keeps large numbers, and refuses some characters
			return values, nil
		}
		return values, json.Unmarshal(data, &values[0])
	}
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var v map[string]any
		end := d.Decode(&v)
		if errors.Is(end, io.EOF) && !strings.Contains(err.Error(), "already set") {
			return values, nil
		}
		if end != nil {
			return nil, err
		}
		values = append(values, v)
	}
}

// takeApart calls each with the object of a document, or those of its list, and what is wrong with it.
func takeApart(v any, each func(o map[string]any, problem string)) {
	o, ok := v.(map[string]any)
	kind, _ := o["kind"].(string)
	items, list := o["items"].([]any)
	switch {
	case v == nil: // comments only
	case !ok:
		each(nil, "is no object: a mapping with apiVersion, kind and metadata.name")
	case !list || !strings.HasSuffix(kind, "List"):
		each(o, problem(o, kind))
	default:
		for _, item := range items {
			if m, ok := item.(map[string]any); ok && kind != "List" && m["kind"] == nil {
				m["kind"], m["apiVersion"] = strings.TrimSuffix(kind, "List"), o["apiVersion"]
			}
			takeApart(item, each)
		}
	}
}

// problem says what an object lacks to be made; "": nothing.
func problem(o map[string]any, kind string) string {
	metadata, _ := o["metadata"].(map[string]any)
	name, _ := metadata["name"].(string)
	version, _ := o["apiVersion"].(string)
	what := "metadata.name is missing, or no text"
	switch {
	case version == "":
		what = "apiVersion is missing, or no text"
	case kind == "":
		what = "kind is missing, or no text"
	case name == "" && metadata["generateName"] != nil:
		what = "metadata.generateName without name would make one more object at each start of a node: give it a metadata.name"
	case name != "":
		return ""
	}
	return strings.TrimPrefix(strings.TrimSpace(kind+" "+name)+": "+what, ": ")
}

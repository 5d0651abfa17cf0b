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
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v2" // kubectl's; version 3 is YAML 1.2
)

// Problem is what is wrong with a document.
type Problem struct {
	Line int // counts from 1
	What string
}

func (p Problem) String() string { return fmt.Sprintf("line %d: %s", p.Line, p.What) }

var (
	byteOrderMark = []byte("\ufeff")
	separator     = []byte("---")
	// mistyped is a line that is meant to be a separator, and is none.
	mistyped = regexp.MustCompile(`(?m)^(?:-{2}|-{4,})[ \t\r]*$`)
	// position is where an error of the parser is.
	position = regexp.MustCompile(`^(?:yaml: )?line (\d+): `)
)

// Read returns the objects of all documents, and what is wrong with the others.
func Read(text []byte) (objects []map[string]any, problems []Problem) {
	line, first := 1, 1
	var document []byte
	end := func() {
		found, wrong := read(document, first)
		objects, problems = append(objects, found...), append(problems, wrong...)
	}
	for rest := bytes.TrimPrefix(text, byteOrderMark); len(rest) > 0; line++ {
		next := rest
		if i := bytes.IndexByte(rest, '\n'); i >= 0 {
			next = rest[:i+1]
		}
		rest = rest[len(next):]
		if after, ok := bytes.CutPrefix(next, separator); ok {
			if after = bytes.TrimSpace(after); len(after) == 0 || after[0] == '#' {
				end()
				document, first = nil, line+1
				continue
			}
		}
		document = append(document, next...)
	}
	end()
	return objects, problems
}

// read reads what is between two separators, which begins at a line.
func read(text []byte, first int) (objects []map[string]any, problems []Problem) {
	values, problems := decode(text, first)
	begin := first
	for line := range bytes.Lines(text) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' {
			break
		}
		begin++
	}
	for _, v := range values {
		found, wrong := objectsOf(v)
		objects = append(objects, found...)
		for _, what := range wrong {
			problems = append(problems, Problem{begin, what})
		}
	}
	if at := mistyped.FindIndex(text); at != nil && len(problems) > 0 {
		problems[0].Line = first + bytes.Count(text[:at[0]], []byte("\n"))
		problems[0].What = fmt.Sprintf("%q separates no documents, as \"---\" does; %s", bytes.TrimSpace(text[at[0]:at[1]]), problems[0].What)
	}
	return objects, problems
}

// decode decodes a text, which mostly is one document.
func decode(text []byte, first int) (values []any, problems []Problem) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.SetStrict(true) // a key that is there twice is an error
	for {
		var v any
		err := d.Decode(&v)
		wrong := new(yaml.TypeError)
		switch {
		case errors.Is(err, io.EOF):
			return values, problems
		case errors.As(err, &wrong):
			for _, what := range wrong.Errors {
				problems = append(problems, located(what, first))
			}
		case err != nil:
			if all, ok := decodeJSON(text); ok {
				return all, nil
			}
			return values, append(problems, located(err.Error(), first))
		case v != nil: // otherwise it is empty
			if v, err = plain(v); err == nil {
				values = append(values, v)
			} else {
				problems = append(problems, Problem{first, err.Error()})
			}
		}
	}
}

// decodeJSON decodes what YAML lacks of JSON: one value after the other, and some escaped characters.
func decodeJSON(text []byte) (values []any, ok bool) {
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var v map[string]any
		if err := d.Decode(&v); err != nil {
			return values, errors.Is(err, io.EOF)
		}
		values = append(values, v)
	}
}

// located is an error of the parser, with the line in the whole text.
func located(what string, first int) Problem {
	line := 1
	if m := position.FindStringSubmatch(what); m != nil {
		line, _ = strconv.Atoi(m[1])
		what = what[len(m[0]):]
	}
	if strings.Contains(what, "cannot start any token") {
		what += "; YAML is indented with spaces, not with tabs"
	}
	return Problem{first + line - 1, "not valid YAML: " + strings.TrimPrefix(what, "yaml: ")}
}

// plain is a value as JSON has it.
func plain(v any) (any, error) {
	var err error
	switch v := v.(type) {
	case map[any]any:
		m := make(map[string]any, len(v))
		for k, item := range v {
			key, err := keyOf(k)
			if _, twice := m[key]; twice {
				err = fmt.Errorf("key %q is there twice", key)
			}
			if err != nil {
				return nil, err
			}
			if m[key], err = plain(item); err != nil {
				return nil, err
			}
		}
		return m, nil
	case []any:
		for i := range v {
			if v[i], err = plain(v[i]); err != nil {
				return nil, err
			}
		}
	case int:
		if number := float64(v); math.Abs(number) < 1<<53 {
			return number, nil
		}
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return nil, fmt.Errorf("%v is no number that Kubernetes knows", v)
		}
	}
	return v, nil
}

// keyOf is the key of a mapping, as text.
func keyOf(key any) (string, error) {
	switch key := key.(type) {
	case string:
		return key, nil
	case float64:
		return strconv.FormatFloat(key, 'g', -1, 32), nil // as kubectl writes them
	case int, int64, uint64, bool:
		return fmt.Sprint(key), nil
	}
	return "", fmt.Errorf("key %v is no text", key)
}

// objectsOf are the object of a document, or those of its list.
func objectsOf(v any) (objects []map[string]any, problems []string) {
	o, ok := v.(map[string]any)
	if !ok {
		return nil, []string{"is no object: a mapping with apiVersion, kind and metadata.name"}
	}
	kind, _ := o["kind"].(string)
	items, list := o["items"]
	if !list || !strings.HasSuffix(kind, "List") {
		if what := lacks(o); what != "" {
			return nil, []string{what}
		}
		return []map[string]any{o}, nil
	}
	all, ok := items.([]any)
	if !ok && items != nil {
		return nil, []string{kind + ": items is no list"}
	}
	for _, item := range all {
		if m, ok := item.(map[string]any); ok && kind != "List" && m["kind"] == nil && m["apiVersion"] == nil {
			m["kind"], m["apiVersion"] = strings.TrimSuffix(kind, "List"), o["apiVersion"]
		}
		found, wrong := objectsOf(item)
		objects, problems = append(objects, found...), append(problems, wrong...)
	}
	return objects, problems
}

// lacks says what an object lacks to be made; "": nothing.
func lacks(o map[string]any) string {
	metadata, _ := o["metadata"].(map[string]any)
	name, _ := metadata["name"].(string)
	kind, _ := o["kind"].(string)
	version, _ := o["apiVersion"].(string)
	about := strings.TrimSpace(kind + " " + name)
	if about == "" {
		about = "the object"
	}
	const missing = " is missing, or no text"
	switch {
	case version == "":
		return about + ": apiVersion" + missing
	case kind == "":
		return about + ": kind" + missing
	case name == "" && metadata["generateName"] != nil:
		return about + ": metadata.generateName without name would make one more object at each start of a node: give it a metadata.name"
	case name == "":
		return about + ": metadata.name" + missing
	}
	return ""
}

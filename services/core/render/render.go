// Package render fills in files of YAML that are part of the program. Its language is a small part of text/template's:
//
//	{{ .Name.Field }}   {{ json .Name }}   {{ if .Name }}, {{ if not .Name }}, {{ else }}, {{ end }}
//
// The library itself calls methods by their names. So the linker keeps all methods of all types, which were 4.5 MB of
// PID 1: a test bans it.
package render

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"reflect"
	"text/template/parse"

	"gopkg.in/yaml.v3"
)

// Files are files of YAML with places for values, by name. A value that isn't a plain word is inserted through json,
// which is YAML with all texts quoted. One that isn't given is an error.
type Files map[string]*parse.Tree

// Parse reads files of the program. They have no errors: a test reads each.
func Parse(files fs.FS, pattern string) Files {
	all := Files{}
	names, err := fs.Glob(files, pattern)
	for _, name := range names {
		text, unread := fs.ReadFile(files, name)
		trees, wrong := parse.Parse(path.Base(name), string(text), "", "", map[string]any{"json": true, "not": true})
		err = errors.Join(err, unread, wrong)
		maps.Copy(all, trees)
	}
	if err != nil || len(all) == 0 {
		panic(fmt.Sprintf("%s: %v", pattern, err))
	}
	return all
}

// YAML decodes what a file makes of data.
func (f Files) YAML(name string, data, into any) error {
	text, err := f.Text(name, data)
	if err != nil {
		return err
	}
	return yaml.Unmarshal(text, into)
}

// Text is what a file makes of data.
func (f Files) Text(name string, data any) ([]byte, error) {
	tree := f[name]
	if tree == nil {
		return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	var out bytes.Buffer
	if err := write(&out, tree.Root, data); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out.Bytes(), nil
}

func write(out *bytes.Buffer, list *parse.ListNode, data any) error {
	if list == nil { // there is no else
		return nil
	}
	for _, node := range list.Nodes {
		var err error
		var v reflect.Value
		switch n := node.(type) {
		case *parse.TextNode:
			out.Write(n.Text)
		case *parse.ActionNode:
			if v, err = value(n.Pipe, data); err == nil {
				fmt.Fprint(out, v.Interface())
			}
		case *parse.IfNode:
			if v, err = value(n.Pipe, data); err == nil {
				err = write(out, map[bool]*parse.ListNode{true: n.List, false: n.ElseList}[given(v)], data)
			}
		default:
			err = fmt.Errorf("%s isn't of the language", n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// given is whether a value is more than a zero one.
func given(v reflect.Value) bool {
	return !v.IsZero() && (v.Kind() != reflect.Slice && v.Kind() != reflect.Map || v.Len() > 0)
}

// value is that of a field of data, or what a function makes of it.
func value(pipe *parse.PipeNode, data any) (v reflect.Value, err error) {
	args := pipe.Cmds[0].Args
	field, is := args[len(args)-1].(*parse.FieldNode)
	if !is || len(args) > 2 || len(pipe.Cmds) > 1 {
		return v, fmt.Errorf("%s isn't of the language", pipe)
	}
	v = reflect.ValueOf(data)
	for _, name := range field.Ident {
		switch v = reflect.Indirect(v); v.Kind() {
		case reflect.Map:
			v = v.MapIndex(reflect.ValueOf(name))
		case reflect.Struct:
			v = v.FieldByName(name)
		default:
			v = reflect.Value{}
		}
		if v.IsValid() && v.Kind() == reflect.Interface {
			v = v.Elem()
		}
		if !v.IsValid() {
			return v, fmt.Errorf("%s isn't given", field)
		}
	}
	switch args[0].String() {
	case "json":
		var text []byte
		text, err = json.Marshal(v.Interface())
		v = reflect.ValueOf(string(text))
	case "not":
		v = reflect.ValueOf(!given(v))
	}
	return v, err
}

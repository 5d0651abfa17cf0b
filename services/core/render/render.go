// Package render fills in files of YAML that are part of the program.
package render

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"strings"
	"text/template"

	"gopkg.in/yaml.v3"
)

// Templates are files of YAML with places for values. A value that isn't a plain word is inserted through json, which
// is YAML with all texts quoted. One that isn't given is an error.
func Templates(files fs.FS, pattern string) *template.Template {
	return template.Must(template.New("").Option("missingkey=error").Funcs(template.FuncMap{
		"contains": strings.Contains,
		"cut":      func(text, separator string) []string { return append(strings.SplitN(text, separator, 2), "") },
		"join":     strings.Join,
		"json":     func(v any) (string, error) { data, err := json.Marshal(v); return string(data), err },
	}).ParseFS(files, pattern))
}

// YAML decodes what one of the templates makes of data.
func YAML(t *template.Template, name string, data, into any) error {
	var text bytes.Buffer
	if err := t.ExecuteTemplate(&text, name, data); err != nil {
		return err
	}
	return yaml.Unmarshal(text.Bytes(), into)
}

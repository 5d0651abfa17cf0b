package render

import (
	"strings"
	"testing"
	"testing/fstest"
)

func TestText(t *testing.T) {
	t.Parallel()
	type inner struct{ List []string }
	data := map[string]any{"Word": "w", "In": &inner{[]string{"a", "b: c"}}, "Off": false, "None": []string{}, "Nil": nil}
	for text, want := range map[string]string{
		"a {{ .Word }} b":                                     "a w b",
		"{{ json .In.List }}":                                 `["a","b: c"]`,
		"{{ if .Off }}1{{ else if .Word }}2{{ end }}":         "2",
		"{{ if not .Off }}1{{ end }}{{ if .None }}2{{ end }}": "1",
		"a\n{{- if .Off }}\nb\n{{- end }}\nc":                 "a\nc",
		"{{ .Other }}":                                        "error: .Other isn't given",
		"{{ .Nil }}":                                          "error: .Nil isn't given",
		"{{ .Word.Deep }}":                                    "error: .Word.Deep isn't given",
		"{{ .In.Other }}":                                     "error: .In.Other isn't given",
		"{{ range .None }}{{ end }}":                          "error: isn't of the language",
		"{{ .Word | json }}":                                  "error: isn't of the language",
	} {
		got, err := Parse(fstest.MapFS{"f.yaml": {Data: []byte(text)}}, "*").Text("f.yaml", data)
		if problem, wrong := strings.CutPrefix(want, "error: "); wrong {
			if err == nil || !strings.Contains(err.Error(), problem) {
				t.Errorf("%s: %v, want %s", text, err, problem)
			}
		} else if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", text, got, err, want)
		}
	}
	if _, err := (Files{}).Text("f.yaml", nil); err == nil {
		t.Error("a file that isn't there has a text")
	}
}

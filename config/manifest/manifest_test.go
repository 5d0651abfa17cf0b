package manifest

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// reading is what Read returns, as text.
func reading(t *testing.T, text string) (objects string, problems string) {
	t.Helper()
	all, wrong := Read([]byte(text))
	var lines []string
	for _, o := range all {
		line, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(line))
	}
	var why []string
	for _, p := range wrong {
		why = append(why, p.String())
	}
	return strings.Join(lines, "\n"), strings.Join(why, "\n")
}

const (
	objectA = `{"apiVersion":"v1","kind":"A","metadata":{"name":"a"}}`
	objectB = `{"apiVersion":"v1","kind":"B","metadata":{"name":"b"}}`
	yamlA   = "apiVersion: v1\nkind: A\nmetadata:\n  name: a\n"
	yamlB   = "apiVersion: v1\nkind: B\nmetadata: {name: b}\n"
)

// Documents mean what they mean to kubectl.
func TestReadTakesWhatKubectlTakes(t *testing.T) {
	t.Parallel()
	both := objectA + "\n" + objectB
	with := func(data string) string {
		return `{"apiVersion":"v1","data":` + data + `,"kind":"A","metadata":{"name":"a"}}`
	}
	for name, tc := range map[string]struct{ text, want string }{
		"nothing":              {"", ""},
		"comments only":        {"# nothing\n---\n# more\n", ""},
		"two":                  {yamlA + "---\n" + yamlB, both},
		"first separator":      {"---\n" + yamlA + "---\n" + yamlB + "---\n", both},
		"comment after it":     {"--- # a\n" + yamlA + "--- # b\n" + yamlB, both},
		"spaces after it":      {yamlA + "---   \n" + yamlB, both},
		"tab after it":         {yamlA + "---\t\n" + yamlB, both},
		"content after it":     {yamlA + "--- " + objectB + "\n", both},
		"tag after it":         {yamlA + "--- !!map\n" + yamlB, both},
		"end of a document":    {yamlA + "...\n---\n" + yamlB, both},
		"no newline":           {yamlA + "---\n" + strings.TrimSuffix(yamlB, "\n"), both},
		"CRLF":                 {strings.ReplaceAll("---\n"+yamlA+"--- # x\n"+yamlB, "\n", "\r\n"), both},
		"byte order mark":      {"\ufeff" + yamlA, objectA},
		"mark and separator":   {"\ufeff---\n" + yamlA, objectA},
		"tabs at the end":      {"apiVersion: v1\t\nkind: A\t# a\n  \nmetadata:\t{name: a}\n", objectA},
		"null":                 {"null\n---\n~\n---\n" + yamlA, objectA},
		"JSON":                 {objectA + "\n", objectA},
		"indented JSON":        {"{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"A\",\n\t\"metadata\": {\n\t\t\"name\": \"a\"\n\t}\n}\n", objectA},
		"JSON after JSON":      {objectA + "\n" + objectB, both},
		"JSON without a line":  {objectA + objectB, both},
		"JSON and YAML":        {objectA + "\n---\n" + yamlB, both},
		"escapes of JSON":      {`{"apiVersion":"v1","kind":"A","metadata":{"name":"a"},"data":{"x":"\ud83d\ude00\/"}}`, with(`{"x":"😀/"}`)},
		"numbers as keys":      {yamlA + "data: {9000: a, 1.5: b, true: c, off: d}", with(`{"1.5":"b","9000":"a","false":"d","true":"c"}`)},
		"dates":                {yamlA + "data: {day: 2024-05-01, time: 2024-05-01T00:00:00Z}", with(`{"day":"2024-05-01","time":"2024-05-01T00:00:00Z"}`)},
		"booleans":             {yamlA + "data: [yes, No, ON, off, y, true]", with(`[true,false,true,false,true,true]`)},
		"quoted ones":          {yamlA + `data: ["yes", 'off', "1", '2024-05-01']`, with(`["yes","off","1","2024-05-01"]`)},
		"octal":                {yamlA + "data: [0644, 0o644, 0x10, 1_000]", with(`[420,420,16,1000]`)},
		"large numbers":        {yamlA + "data: [9007199254740993, -9223372036854775808, 18446744073709551615]", with(`[9007199254740993,-9223372036854775808,18446744073709551615]`)},
		"not a number":         {yamlA + "data: [1.10.0, 12e, 0x, 1:30]", with(`["1.10.0","12e","0x","1:30"]`)},
		"anchors and merges":   {yamlA + "data: {a: &x {b: 1}, c: *x, d: {<<: *x, e: 2}}", with(`{"a":{"b":1},"c":{"b":1},"d":{"b":1,"e":2}}`)},
		"control characters":   {yamlA + `data: {x: "\x7f\x1b"}`, with("{\"x\":\"\x7f\\u001b\"}")},
		"a separator in text":  {yamlA + "data:\n  x: |\n    a\n    ---\n    --\n    b\n", with(`{"x":"a\n---\n--\nb\n"}`)},
		"List":                 {"apiVersion: v1\nkind: List\nitems:\n- " + objectA + "\n- " + objectB, both},
		"list of one kind":     {"apiVersion: v1\nkind: AList\nmetadata: {resourceVersion: ''}\nitems: [{metadata: {name: a}}, " + objectB + "]", both},
		"list in a list":       {"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: List, items: [" + objectA + "]}\n- " + objectB, both},
		"empty list":           {"apiVersion: v1\nkind: List\nitems: []\n---\n" + yamlA, objectA},
		"generateName as well": {"apiVersion: v1\nkind: A\nmetadata: {name: a, generateName: b}", `{"apiVersion":"v1","kind":"A","metadata":{"generateName":"b","name":"a"}}`},
	} {
		if got, wrong := reading(t, tc.text); got != tc.want || wrong != "" {
			t.Errorf("%s: problems %q, (-want +got)\n%s", name, wrong, cmp.Diff(tc.want, got))
		}
	}
}

// A document that is wrong is named with its line, and the others are read.
func TestReadNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ text, want string }{
		"duplicate key":       {"apiVersion: v1\nkind: C\nmetadata:\n  name: c\n  name: d\n", `line 10: not valid YAML: key "name" already set in map`},
		"two duplicates":      {"kind: C\nkind: D\nmetadata: {a: 1, a: 2}", "line 7: not valid YAML: key \"kind\" already set in map\nline 8: not valid YAML: key \"a\" already set in map"},
		"duplicate in JSON":   {`{"kind": "C",` + "\n" + `"kind": "D"}`, `line 7: not valid YAML: key "kind" already set in map`},
		"two dashes":          {yamlA + "--\n" + yamlB, `line 10: "--" separates no documents, as "---" does; not valid YAML: `},
		"four dashes":         {yamlA + "----  \n" + yamlB, `line 10: "----" separates no documents, as "---" does; not valid YAML: `},
		"dashes after JSON":   {objectA + "\n--\n" + objectB, `line 7: "--" separates no documents`},
		"no separator":        {yamlA + "...\n" + yamlB, `line 6: not valid YAML: more than one document without "---" between them`},
		"a line of a tab":     {"kind: C\n\t\nmetadata: {name: c}\n", "line 7: not valid YAML: found a tab character that violates indentation"},
		"a tab":               {"kind: C\nmetadata:\n\tname: c\n", "line 8: not valid YAML: found character that cannot start any token"},
		"a bracket":           {"kind: C\nmetadata: [\n", "not valid YAML: did not find expected node content"},
		"no mapping":          {"# comment\n\njust text\n", "line 8: is no object: a mapping with apiVersion, kind and metadata.name"},
		"a list":              {"- " + objectA, "line 6: is no object"},
		"HTML":                {"<html><body>Please log in</body></html>", "line 6: is no object"},
		"no apiVersion":       {"kind: C\nmetadata: {name: c}", "line 6: C c: apiVersion is missing, or no text"},
		"no kind":             {"apiVersion: v1\nmetadata: {name: c}", "line 6: c: kind is missing, or no text"},
		"no metadata":         {"# comment\napiVersion: v1\nkind: C", "line 7: C: metadata.name is missing, or no text"},
		"name is a number":    {"apiVersion: v1\nkind: C\nmetadata: {name: 12}", "line 6: C: metadata.name is missing, or no text"},
		"version is a number": {"apiVersion: 1\nkind: C\nmetadata: {name: c}", "line 6: C c: apiVersion is missing, or no text"},
		"generateName":        {"apiVersion: v1\nkind: C\nmetadata: {generateName: c-}", "line 6: C: metadata.generateName without name would make one more object at each start"},
		"empty mapping":       {"{}", "line 6: apiVersion is missing"},
		"item of a list":      {"apiVersion: v1\nkind: List\nitems: [{kind: C}, 7]", "line 6: C: apiVersion is missing, or no text\nline 6: is no object"},
		"items":               {"apiVersion: v1\nkind: List\nitems: {a: b}", "line 6: List: metadata.name is missing"},
		"infinite":            {"apiVersion: v1\nkind: C\ndata: .inf", "line 6: not valid YAML: json: unsupported value: +Inf"},
		"key is a list":       {"apiVersion: v1\nkind: C\ndata: {[a]: b}", "line 6: not valid YAML: invalid map key"},
		"key is nothing":      {"apiVersion: v1\nkind: C\ndata: {~: b}", "line 6: not valid YAML: unsupported map key"},
		"alias to itself":     {"a: &a [*a]", "not valid YAML: anchor 'a' value contains itself"},
		"unknown anchor":      {"a: *b", "not valid YAML: unknown anchor 'b' referenced"},
	} {
		got, wrong := reading(t, yamlA+"---\n"+tc.text+"\n---\n"+yamlB)
		if !strings.HasPrefix(got, objectA+"\n") || !strings.HasSuffix(got, "\n"+objectB) {
			t.Errorf("%s: the others are %s", name, got)
		}
		if !strings.Contains(wrong, tc.want) || strings.Count(wrong, "\n") != strings.Count(tc.want, "\n") {
			t.Errorf("%s: %q, want %q", name, wrong, tc.want)
		}
	}
}

// Aliases of aliases are refused before they fill the memory.
func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	text.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n")
	for i := range 9 {
		from := "*a" + string(rune('0'+i))
		text.WriteString("a" + string(rune('1'+i)) + ": &a" + string(rune('1'+i)) + " [" + strings.Repeat(from+", ", 9) + from + "]\n")
	}
	began := time.Now()
	if _, wrong := reading(t, text.String()); !strings.Contains(wrong, "excessive aliasing") {
		t.Errorf("aliases of aliases: %q", wrong)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}

// Whatever the text is, there is an answer, and the objects can be sent.
func FuzzRead(f *testing.F) {
	for _, text := range []string{yamlA, objectA, "--\n---\n", "a: &a [*a]", "{<<: 1}", "? {a: b}\n: c", "kind: List\nitems: [1]", "\ufeff"} {
		f.Add(text)
	}
	if own, err := os.ReadFile("manifest.go"); err == nil {
		f.Add(string(own))
	}
	f.Fuzz(func(t *testing.T, text string) {
		objects, problems := Read([]byte(text))
		if _, err := json.Marshal(objects); err != nil {
			t.Error(err)
		}
		lines := strings.Count(text, "\n") + 2
		for _, end := range []string{"\r", "\u0085", "\u2028", "\u2029"} { // ends of lines in YAML 1.1
			lines += strings.Count(text, end)
		}
		for _, p := range problems {
			if p.Line < 1 || p.Line > lines || p.What == "" {
				t.Errorf("%d lines, and %s", lines, p)
			}
		}
	})
}

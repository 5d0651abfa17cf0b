package main

import (
	"bytes"
	"fmt"
	"go/doc/comment"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// proseWidth is that of all pages.
const proseWidth = 120

// referenceHead is the introduction before the tables.
const referenceHead = `# Configuration

<!-- Made by ` + "`" + `go run ./tools/generate config` + "`" + ` from the types in config/ and their comments. Don't edit it here. -->

One YAML document describes a node completely. ` + "`" + `gbctl gen config NAME ENDPOINT` + "`" + ` makes the documents of a new cluster,
with all keys and tokens; fields that are not set have the defaults below. A node keeps its document at
` + "`" + `/system/state/config.yaml` + "`" + ` (the STATE partition), together with the earlier versions; ` + "`" + `gbctl config rollback` + "`" + ` restores
one.

- **Strict parsing.** Unknown keys, wrong types, duplicate keys and contradictory fields are errors. All errors are
  reported together, each with its line, its path and, if possible, a suggestion. ` + "`" + `gbctl validate --config FILE` + "`" + ` does
  this without a node. Settings that work, but maybe not as intended, are warnings.
- **Values.** Durations have a unit (` + "`" + `30s` + "`" + `, ` + "`" + `5m` + "`" + `). The unit of a size is in the tables below. A CIDR is an address with
  a prefix length, such as 10.0.0.21/24. Permissions are octal. Certificates and keys are PEM, encoded once more as
  base64 (` + "`" + `base64 -w0 FILE` + "`" + `). Arguments of programs are written without dashes. ` + "`" + `null` + "`" + ` and an empty value mean that the
  field is not set. A document has at most 1 MiB.
- **Secrets.** Secret fields are never shown in logs, in the output of ` + "`" + `--dry-run` + "`" + `, or in a support bundle. The same is
  true for the content of files without ` + "`" + `public: true` + "`" + `, for the environment except the proxies, and for passwords and
  tokens in URLs.
- **Changes.** ` + "`" + `gbctl apply-config -f FILE` + "`" + `, ` + "`" + `gbctl edit mc` + "`" + ` and ` + "`" + `gbctl patch mc -p PATCH` + "`" + ` change a running node. The
  column *change* shows what a change needs: **live** takes effect at once, **restarts** names the service that restarts
  (pods keep running), and **reboot** takes effect at the next boot: ` + "`" + `--immediate` + "`" + ` refuses such a change, ` + "`" + `--on-reboot` + "`" + `
  stages it until then. ` + "`" + `--dry-run` + "`" + ` shows this without a change. With ` + "`" + `--mode=try` + "`" + `, the node undoes the change unless
  you confirm it. With several nodes, gbctl waits for a node that reboots until it is healthy again before it changes
  the next one. A node takes changes while it boots, too, whatever its services wait for. It refuses all changes, also
  those for the next boot, until STATE is mounted, while another change is being tried, and when it is about to reboot.
- **Patches** are JSON patches (RFC 6902, a list of operations), or a part of a configuration to merge. In a merge,
  mappings are merged, ` + "`" + `key: null` + "`" + ` deletes a key, and lists are replaced. In lists that are marked *by …* below, entries
  with the same key are merged instead: of several keys, the first one that both entries have counts. If the document
  has several entries of a key, a patch with fewer of them changes the one that has its values, and adds an entry if
  none has. ` + "`" + `$patch: delete` + "`" + ` in an entry deletes it, ` + "`" + `$patch: replace` + "`" + ` replaces it. Comments and the order of the
  document stay.
- **Editors.** ` + "`" + `gbctl schema` + "`" + ` prints a JSON schema; it is also in
  [config/schema/v1alpha1.json](../config/schema/v1alpha1.json).

The smallest document of a worker, with shortened secrets:

` + "```" + `yaml
version: v1alpha1
machine:
  type: worker
  token: k3x0ud.…
  ca: {crt: LS0tLS1C…}
  install: {disk: /dev/sda}
cluster:
  token: q9pyzr.…
  ca: {crt: LS0tLS1C…}
  controlPlane: {endpoint: "https://cluster.example.org:6443"}
` + "```" + `

Control planes also need the private keys of these authorities, ` + "`" + `cluster.aggregatorCA` + "`" + `, ` + "`" + `cluster.etcd.ca` + "`" + ` and
` + "`" + `cluster.serviceAccount` + "`" + `.
`

func referenceOf(words comments, examples string) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(referenceHead)
	top := config.Field{Path: "", Type: reflect.TypeFor[config.Config](), Fields: config.Fields()}
	b.WriteString("\n## Fields\n\n")
	section(&b, words, top, "The document")
	if err := exampleSection(&b, examples); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// section writes the table of a struct's fields, and those of the structs inside.
func section(b *bytes.Buffer, words comments, f config.Field, title string) {
	fmt.Fprintf(b, "### %s\n\n", title)
	if f.Owner != nil {
		var about []string
		for _, name := range []string{f.Owner.Name() + "." + f.Name, structOf(f.Type).Name()} {
			if words[name] != "" {
				about = append(about, strings.TrimSuffix(words[name], ".")+".")
			}
		}
		if effect := noEffect(f); effect != "" {
			about = append(about, effect)
		}
		prose := comment.Printer{TextWidth: proseWidth}
		b.Write(append(prose.Text(new(comment.Parser).Parse(strings.Join(about, " "))), '\n'))
	}
	b.WriteString("| field | type | default | change | |\n|---|---|---|---|---|\n")
	prefix := entryPath(f)
	var deeper []config.Field
	rows(b, words, f.Fields, prefix, &deeper)
	b.WriteByte('\n')
	for _, inner := range deeper {
		section(b, words, inner, "`"+inner.Path+"`")
	}
}

// entryPath is the prefix of the paths of the inner fields.
func entryPath(f config.Field) string {
	switch {
	case f.Path == "":
		return ""
	case f.Type.Kind() == reflect.Slice:
		return f.Path + "[]."
	case f.Type.Kind() == reflect.Map:
		return f.Path + ".<name>."
	}
	return f.Path + "."
}

// noEffect says so of a field, or nothing.
func noEffect(f config.Field) string {
	switch {
	case f.Refused:
		return "**Not supported in this release: machines refuse it, and it has no effect in containers.**"
	case f.NoEffect:
		return "**Has no effect.**"
	}
	return ""
}

// maxInlineFields is the number of fields up to which a struct is shown within the table of its parent.
const maxInlineFields = 3

func rows(b *bytes.Buffer, words comments, fields []config.Field, prefix string, deeper *[]config.Field) {
	for _, f := range fields {
		name := "`" + strings.TrimPrefix(f.Path, prefix) + "`"
		switch {
		case len(f.Fields) == 0:
			fmt.Fprintf(b, "| %s | %s | %s | %s | %s |\n", name, typeCell(f), cell(defaultCell(f)), cell(effectCell(f)), cell(wordsCell(words, f)))
		case small(f):
			fmt.Fprintf(b, "| %s | %s | | | %s |\n", name, typeCell(f), cell(wordsCell(words, f)))
			rows(b, words, f.Fields, prefix, deeper)
		default:
			fmt.Fprintf(b, "| [%s](#%s) | %s | | | %s |\n", name, anchor(f.Path), typeCell(f), cell(wordsCell(words, f)))
			*deeper = append(*deeper, f)
		}
	}
}

// small reports whether a struct is no list and has few fields, all of them plain.
func small(f config.Field) bool {
	isList := f.Type.Kind() != reflect.Struct && f.Type.Kind() != reflect.Pointer
	return !isList && len(f.Fields) <= maxInlineFields && !slices.ContainsFunc(f.Fields, func(inner config.Field) bool { return len(inner.Fields) > 0 })
}

// anchor is how GitHub and others link to a heading.
func anchor(path string) string {
	return strings.NewReplacer(".", "", "[", "", "]", "", "<", "", ">", "").Replace(strings.ToLower(path))
}

func typeCell(f config.Field) string {
	name := config.TypeName(f.Type)
	if len(f.Keys) > 0 {
		name += ", by `" + strings.Join(f.Keys, "`, `") + "`"
	}
	return name
}

func defaultCell(f config.Field) string {
	switch {
	case f.Default != "":
		return "`" + f.Default + "`"
	case f.Type.Kind() == reflect.Bool:
		return "`false`"
	}
	return ""
}

func effectCell(f config.Field) string {
	words := effectWords(f)
	if name, rest, found := strings.Cut(words, ";"); found {
		return "**" + name + "**;" + rest
	}
	return "**" + words + "**"
}

// wordsCell is the comment, with the meanings of the values if there are few.
func wordsCell(words comments, f config.Field) string {
	out := words.of(f)
	if effect := noEffect(f); effect != "" {
		out = strings.TrimSuffix(out, ".") + ". " + effect
	}
	if len(f.Choices) < 2 {
		return out
	}
	var values []string
	for _, choice := range f.Choices {
		value := "`" + choice + "`"
		if meaning := words[f.Type.Name()+"="+choice]; meaning != "" {
			value += " (" + strings.ToLower(meaning[:1]) + meaning[1:] + ")"
		}
		values = append(values, value)
	}
	if out = strings.TrimSuffix(out, "."); out != "" {
		out += ". "
	}
	return out + "One of " + strings.Join(values, ", ")
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// exampleSection shows parts of configurations. The first line of each, a comment, is the
// heading. A test loads them.
func exampleSection(b *bytes.Buffer, dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no examples in %s: %w", dir, err)
	}
	b.WriteString("## Examples\n\nEach example is a part of a document; `gbctl patch mc -p @FILE` merges it into the configuration of a node.\n")
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		title, rest, _ := strings.Cut(string(data), "\n")
		fmt.Fprintf(b, "\n### %s\n\n```yaml\n%s```\n", strings.TrimPrefix(title, "# "), rest)
	}
	return nil
}

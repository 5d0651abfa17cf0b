package main

import (
	"bytes"
	_ "embed"
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
//
//go:embed reference_head.txt
var referenceHead string

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
	if f.NoEffect {
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

package main

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// The schema of the configuration and its reference page are made of three
// things: the types, as config.Fields shows them; the comments in their source,
// which no program can see at run time; and, for the schema, a table of the
// bounds that checks hold values to.

const (
	schemaFile    = "config/schema/v1alpha1.json"
	referenceFile = "docs/configuration.md"
)

func configFiles(_ context.Context, root string) (map[string][]byte, error) {
	words, err := readComments(filepath.Join(root, "config"))
	if err != nil {
		return nil, err
	}
	schema, err := schemaOf(words)
	if err != nil {
		return nil, err
	}
	reference, err := referenceOf(words, filepath.Join(root, "config/testdata/examples"))
	if err != nil {
		return nil, err
	}
	return map[string][]byte{schemaFile: schema, referenceFile: reference}, nil
}

// comments are the comments of the source: by Type, Type.Field, and "Type=value" for the
// constants of a type.
type comments map[string]string

func readComments(dir string) (comments, error) {
	words := comments{}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(names) == 0 {
		return nil, fmt.Errorf("no source in %s: %w", dir, err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			if gen, ok := decl.(*ast.GenDecl); ok {
				words.declaration(gen)
			}
		}
	}
	return words, nil
}

func (c comments) declaration(decl *ast.GenDecl) {
	for _, spec := range decl.Specs {
		switch spec := spec.(type) {
		case *ast.TypeSpec:
			name := spec.Name.Name
			if structure, ok := spec.Type.(*ast.StructType); ok {
				c[name] = text(name, decl.Doc)
				for _, f := range structure.Fields.List {
					for _, field := range f.Names {
						c[name+"."+field.Name] = text(field.Name, f.Doc, f.Comment)
					}
				}
			}
		case *ast.ValueSpec:
			if typ, ok := spec.Type.(*ast.Ident); ok && len(spec.Values) == 1 && spec.Comment != nil {
				if value, ok := spec.Values[0].(*ast.BasicLit); ok {
					c[typ.Name+"="+strings.Trim(value.Value, `"`)] = text("", spec.Comment)
				}
			}
		}
	}
}

// text is a comment in one line, for readers who don't know Go: "Token authorises a node"
// becomes "Authorises a node".
func text(name string, groups ...*ast.CommentGroup) string {
	for _, group := range groups {
		if group == nil {
			continue
		}
		s := strings.Join(strings.Fields(group.Text()), " ")
		if rest, ok := strings.CutPrefix(s, name+" "); ok && name != "" {
			s = strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(rest, "is "), "are "), "has ")
		}
		if s == "" {
			continue
		}
		s = strings.ToUpper(s[:1]) + s[1:]
		if first, _, _ := strings.Cut(s, " "); lowerCase[strings.ToLower(strings.TrimRight(first, ".,;"))] {
			s = strings.ToLower(s[:1]) + s[1:]
		}
		return constants.ReplaceAllStringFunc(s, func(name string) string { return "`" + images[name] + "`" })
	}
	return ""
}

// lowerCase are names that stay in lower case at the start of a sentence.
var lowerCase = map[string]bool{"kube-apiserver": true, "kube-controller-manager": true, "kube-scheduler": true, "kube-proxy": true, "etcd": true, "http": true, "ms": true}

// constants of the source are replaced by their values.
var constants = regexp.MustCompile(`\bDefault\w+Image\b`)

var images = map[string]string{
	"DefaultKubeletImage": config.DefaultKubeletImage, "DefaultEtcdImage": config.DefaultEtcdImage,
	"DefaultAPIServerImage": config.DefaultAPIServerImage, "DefaultControllerManagerImage": config.DefaultControllerManagerImage,
	"DefaultSchedulerImage": config.DefaultSchedulerImage, "DefaultProxyImage": config.DefaultProxyImage,
	"DefaultCoreDNSImage": config.DefaultCoreDNSImage, "DefaultFlannelImage": config.DefaultFlannelImage,
	"DefaultPoliciesImage": config.DefaultPoliciesImage,
}

// of is the comment of a field, or that of its type if the field has none.
func (c comments) of(f config.Field) string {
	if words := c[f.Owner.Name()+"."+f.Name]; words != "" {
		return words
	}
	return c[structOf(f.Type).Name()]
}

// structOf is the type inside of lists, mappings and pointers.
func structOf(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	return t
}

// requiredWords are at the start or end of the comment of a required field. Fields that
// are required only on some machines have another text.
var requiredWords = regexp.MustCompile(`^Required\b|\bRequired\.$`)

func (c comments) required(f config.Field) bool {
	return requiredWords.MatchString(c[f.Owner.Name()+"."+f.Name])
}

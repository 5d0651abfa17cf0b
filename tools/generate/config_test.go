package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// unusedRows lists rows of the tables of the schema that no field has.
func unusedRows() []string {
	var paths []string
	var visit func([]config.Field)
	visit = func(fields []config.Field) {
		for _, f := range fields {
			paths = append(paths, f.Path)
			visit(f.Fields)
		}
	}
	visit(config.Fields())
	rows := slices.Concat(slices.Collect(maps.Keys(valueNodes)), slices.Collect(maps.Keys(limits)), slices.Collect(maps.Keys(singles)))
	return slices.DeleteFunc(rows, func(row string) bool { return slices.Contains(paths, row) })
}

func TestTablesOfTheSchemaNameFields(t *testing.T) {
	t.Parallel()
	if unused := unusedRows(); len(unused) > 0 {
		t.Errorf("no field is called %v", unused)
	}
}

// Every field is described, and what its comment says of its default is true.
func TestEveryFieldIsDescribed(t *testing.T) {
	t.Parallel()
	const root = "../.."
	words, err := readComments(filepath.Join(root, "config"))
	if err != nil {
		t.Fatal(err)
	}
	var visit func([]config.Field)
	visit = func(fields []config.Field) {
		for _, f := range fields {
			said := words.of(f)
			if said == "" && !plain[f.Path[strings.LastIndexByte(f.Path, '.')+1:]] {
				t.Errorf("%s has no comment", f.Path)
			}
			if f.Default != "" && f.Type.Kind().String() != "bool" && !strings.Contains(strings.ToLower(said), "default") && said != "" {
				t.Errorf("%s has the default %s, of which its comment %q says nothing", f.Path, f.Default, said)
			}
			visit(f.Fields)
		}
	}
	visit(config.Fields())
}

// plain are names that say all there is to say.
var plain = map[string]bool{"username": true, "password": true}

// The page can be read without the source: no Go in it.
func TestReferenceSpeaksYAML(t *testing.T) {
	t.Parallel()
	const root = "../.."
	page, err := os.ReadFile(filepath.Join(root, referenceFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"netip.", "[]string", "map[", "*bool", "DefaultKubelet", "Links merges"} {
		if strings.Contains(string(page), word) {
			t.Errorf("the page says %q", word)
		}
	}
}

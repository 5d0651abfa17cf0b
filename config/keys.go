package config

import (
	"reflect"
	"strings"
	"sync"
)

// ListKeys are the names of the fields that identify the entries of a list: the first one that both of
// two entries have. They are nil if the entries have no identity. Entries that differ in apart aren't the
// same. path is that of the list in the schema, with [] for entries, such as machine.network.interfaces[].vlans.
func ListKeys(path string) (keys []string, apart string) {
	fields, _ := schema()
	return keysOfTag(fields[path].Tag), fields[path].Tag.Get("apart")
}

// IsMap reports whether the keys at a path are chosen by the user, such as
// those of machine.env, and aren't fields.
func IsMap(path string) bool {
	fields, _ := schema()
	field, known := fields[path]
	return known && field.Type.Kind() == reflect.Map
}

func keysOfTag(tag reflect.StructTag) []string {
	return strings.FieldsFunc(tag.Get("key"), func(r rune) bool { return r == ',' })
}

// schema has all fields by their paths, and the paths in the order of the document.
var schema = sync.OnceValues(func() (fields map[string]reflect.StructField, paths []string) {
	fields = map[string]reflect.StructField{}
	var visit func(reflect.Type, string)
	visit = func(t reflect.Type, prefix string) {
		for f := range t.Fields() {
			path := prefix + f.Tag.Get("yaml")
			fields[path], paths = f, append(paths, path)
			if inner, suffix := element(f.Type); inner != nil {
				visit(inner, path+suffix+".")
			}
		}
	}
	visit(reflect.TypeFor[Config](), "")
	return fields, paths
})

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
	shape := shapes()[path]
	return shape.keys, shape.apart
}

// IsMap reports whether the keys at a path are chosen by the user, such as
// those of machine.env, and aren't fields.
func IsMap(path string) bool { return shapes()[path].isMap }

// shape describes what is at a path of the schema.
type shape struct {
	keys  []string
	apart string
	isMap bool
}

func keysOfTag(tag reflect.StructTag) []string {
	return strings.FieldsFunc(tag.Get("key"), func(r rune) bool { return r == ',' })
}

var shapes = sync.OnceValue(func() map[string]shape {
	all := map[string]shape{}
	var visit func(reflect.Type, string)
	visit = func(t reflect.Type, prefix string) {
		for i := range t.NumField() {
			f := t.Field(i)
			path := prefix + f.Tag.Get("yaml")
			all[path] = shape{keysOfTag(f.Tag), f.Tag.Get("apart"), f.Type.Kind() == reflect.Map}
			if inner, suffix := element(f.Type); inner != nil {
				visit(inner, path+suffix+".")
			}
		}
	}
	visit(reflect.TypeFor[Config](), "")
	return all
})

package config

import (
	"reflect"
	"sync"
)

// ListKey is the name of the field that identifies the entries of a list, or ""
// if they have no identity. path is that of the list in the schema, with [] for
// entries, such as machine.network.interfaces[].vlans.
func ListKey(path string) string { return shapes()[path].key }

// IsMap reports whether the keys at a path are chosen by the user, such as
// those of machine.env, and aren't fields.
func IsMap(path string) bool { return shapes()[path].isMap }

// shape describes what is at a path of the schema.
type shape struct {
	key   string
	isMap bool
}

var shapes = sync.OnceValue(func() map[string]shape {
	all := map[string]shape{}
	var visit func(reflect.Type, string)
	visit = func(t reflect.Type, prefix string) {
		for i := range t.NumField() {
			f := t.Field(i)
			path := prefix + f.Tag.Get("yaml")
			all[path] = shape{key: f.Tag.Get("key"), isMap: f.Type.Kind() == reflect.Map}
			if inner, suffix := element(f.Type); inner != nil {
				visit(inner, path+suffix+".")
			}
		}
	}
	visit(reflect.TypeFor[Config](), "")
	return all
})

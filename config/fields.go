package config

import (
	"net/netip"
	"reflect"
	"strings"
)

// Field describes one field of the schema, for the reference page, editors, and
// clients that explain a key.
type Field struct {
	// Path has [] for the entries of a list and <name> for the keys of a
	// mapping, such as machine.network.interfaces[].mtu.
	Path string
	// Type is the type of the field, Owner the struct that contains it, Name its name there.
	Type  reflect.Type
	Owner reflect.Type
	Name  string
	// Choices are the allowed values, if they are few.
	Choices []string
	// Deprecated are former names of the field.
	Deprecated []string
	// Keys are the fields that identify the entries of a list.
	Keys []string
	// Min and Max bound a number, if Max isn't 0.
	Min, Max int64
	// Default is the value of a field that isn't set, as text, or "".
	Default string
	// Effect and Note are those of a change; a field that has fields of its own
	// has none.
	Effect Effect
	Note   string
	// NoEffect: the field is read and checked, but has no effect.
	NoEffect bool
	// Fields are the fields inside of this one.
	Fields []Field
}

// Fields describes the whole schema, in the order of the document.
func Fields() []Field {
	c := example(reflect.TypeFor[Config]()).Interface().(Config)
	c.FillDefaults()
	return fieldsOf(reflect.ValueOf(c), "", "")
}

// example is a value with one entry in every list and behind every pointer, so
// that the defaults of entries are visible.
func example(t reflect.Type) reflect.Value {
	v := reflect.New(t).Elem()
	inner, _ := element(t)
	switch {
	case inner == nil:
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		v.Elem().Set(example(t.Elem()))
	case t.Kind() == reflect.Slice:
		v.Set(reflect.Append(v, example(t.Elem())))
	case t.Kind() == reflect.Map:
		v.Set(reflect.MakeMap(t))
		v.SetMapIndex(reflect.ValueOf(anyName), example(t.Elem()))
	default:
		for _, field := range v.Fields() {
			field.Set(example(field.Type()))
		}
	}
	return v
}

// anyName stands for the keys of a mapping.
const anyName = "<name>"

// fieldsOf lists the fields of a struct. row is its path in the apply table,
// path the one to show.
func fieldsOf(v reflect.Value, row, path string) []Field {
	var all []Field
	for f, inner := range v.Fields() {
		name := f.Tag.Get("yaml")
		field := Field{Path: join(path, name), Type: f.Type, Owner: v.Type(), Name: f.Name, Keys: keysOfTag(f.Tag)}
		if apart := f.Tag.Get("apart"); apart != "" {
			field.Keys = append(field.Keys, apart)
		}
		for old, now := range renamed {
			if now == name {
				field.Deprecated = append(field.Deprecated, old)
			}
		}
		at := join(row, name)
		if t, suffix := element(f.Type); t != nil {
			within := field.Path
			switch inner.Kind() {
			case reflect.Pointer:
				inner = inner.Elem()
			case reflect.Slice:
				inner, within = inner.Index(0), within+"[]"
			case reflect.Map:
				inner, within = inner.MapIndex(reflect.ValueOf(anyName)), join(within, anyName)
			}
			field.Fields = fieldsOf(inner, at+suffix, within)
		} else {
			row := rowOf(at)
			field.Effect, field.Note = row.Effect, row.Note
			if !inner.IsZero() && (inner.Kind() != reflect.Slice || inner.Len() > 0) {
				field.Default = plainShow(inner)
			}
			if rule := tables().Values[at]; rule != nil {
				field.Choices, field.NoEffect = rule.Choices, rule.Idle
				if TypeName(f.Type) == "number" { // others have a length from min to max
					field.Min, field.Max = rule.Min, rule.Max
				}
			}
		}
		all = append(all, field)
	}
	return all
}

// join is the path of what is called name inside of a path.
func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// forms are the names of types that are text of a certain form.
var forms = map[reflect.Type]string{
	reflect.TypeFor[netip.Addr]():   "address",
	reflect.TypeFor[netip.Prefix](): "CIDR",
	durationType:                    "duration",
	reflect.TypeFor[URL]():          "URL",
	reflect.TypeFor[PEM]():          "base64 of PEM",
	keyType:                         "base64 of PEM, secret",
	secretType:                      "text, secret",
	reflect.TypeFor[FileMode]():     "octal number",
	reflect.TypeFor[Taint]():        "taint",
	reflect.TypeFor[DiskSize]():     "comparison with a size",
	reflect.TypeFor[ByteSize]():     "size",
	objectType:                      "mapping",
	argsType:                        "mapping of texts, or of lists of texts",
}

// TypeName is the name of the field's type in documentation.
func TypeName(t reflect.Type) string {
	if form, ok := forms[t]; ok {
		return form
	}
	switch t.Kind() {
	case reflect.Pointer:
		return TypeName(t.Elem())
	case reflect.Slice:
		return "list of " + plural(TypeName(t.Elem()))
	case reflect.Map:
		if t.Elem().Kind() == reflect.String {
			return "mapping of texts"
		}
		return "mapping of " + plural(TypeName(t.Elem()))
	case reflect.Struct:
		return "mapping"
	case reflect.Bool:
		return "boolean"
	case reflect.String:
		return "text"
	}
	return "number"
}

func plural(name string) string {
	if strings.HasSuffix(name, "s") {
		return name + "es"
	}
	return name + "s"
}

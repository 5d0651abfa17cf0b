package resource

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
)

// Definition describes a type to users: its names and its table columns.
type Definition struct {
	Type      string   // StaticPods.kubernetes.garboard.dev
	Kind      string   // StaticPod, as tables print it
	Aliases   []string // "bs", beside the lower-case plural that is always one
	Namespace string   // the default one
	Columns   []Column

	spec reflect.Type
}

// Spec is the Go type of the specs.
func (d Definition) Spec() reflect.Type { return d.spec }

// Column is a type-specific column of `get` tables. A field of the spec is one if it has the
// tag `column:"READY"`; Definition.Columns are those that are no field's value.
type Column struct {
	Name string // upper case: READY
	// From is the type whose object of the same namespace and ID has the value: what
	// is seen of a thing has another writer than the thing. "" is the type itself.
	From  string
	Value func(spec any) string
}

// fieldColumns are the columns that are fields of a spec.
func fieldColumns(spec reflect.Type) (all []Column) {
	if spec.Kind() != reflect.Struct {
		return nil
	}
	for field := range spec.Fields() {
		if name := field.Tag.Get("column"); name != "" {
			all = append(all, Column{Name: name, Value: func(s any) string { return Cell(reflect.ValueOf(s).FieldByIndex(field.Index).Interface()) }})
		}
	}
	return all
}

// Cell is the value of a field in a table. A time that never was is empty.
func Cell(value any) string {
	switch v := value.(type) {
	case time.Time:
		if v.IsZero() {
			return ""
		}
		return v.UTC().Format(time.RFC3339)
	case time.Duration:
		return v.Round(time.Microsecond).String()
	case []string:
		return strings.Join(v, "; ")
	}
	return fmt.Sprint(value)
}

// plural is the type's short name: "staticpods".
func (d Definition) plural() string {
	name, _, _ := strings.Cut(d.Type, ".")
	return strings.ToLower(name)
}

// names are all that Resolve finds the type by, in lower case.
func (d Definition) names() []string {
	names := lists.Of(append([]string{d.Type, d.Kind, d.plural()}, d.Aliases...), strings.ToLower)
	slices.Sort(names)
	return slices.Compact(names)
}

// registry holds the types of the program, filled while its packages initialize.
var registry = struct {
	sync.RWMutex
	byName map[string]*Definition
	all    []*Definition
}{byName: make(map[string]*Definition)}

func register(d Definition) *Definition {
	registry.Lock()
	defer registry.Unlock()
	if !strings.Contains(d.Type, ".") || d.Kind == "" || d.Namespace == "" {
		panic(fmt.Sprintf("define resource type %q: needs a full name, a kind and a namespace", d.Type))
	}
	for _, name := range d.names() {
		if taken := registry.byName[name]; taken != nil {
			panic(fmt.Sprintf("define resource type %s: the name %q belongs to %s", d.Type, name, taken.Type))
		}
	}
	for _, name := range d.names() {
		registry.byName[name] = &d
	}
	registry.all = append(registry.all, &d)
	return &d
}

// Definitions returns the registered types, sorted by type.
func Definitions() []Definition {
	registry.RLock()
	defer registry.RUnlock()
	all := lists.Of(registry.all, func(d *Definition) Definition { return *d })
	slices.SortFunc(all, func(a, b Definition) int { return strings.Compare(a.Type, b.Type) })
	return all
}

// Resolve finds a type by any of its names, whatever their case: alias ("bs"),
// plural ("bootstrapstatus"), kind, full name. The error wraps ErrNotFound.
func Resolve(name string) (Definition, error) {
	registry.RLock()
	defer registry.RUnlock()
	if d := registry.byName[strings.ToLower(name)]; d != nil {
		return *d, nil
	}
	known := lists.Of(registry.all, func(d *Definition) string { return d.plural() })
	slices.Sort(known)
	return Definition{}, fmt.Errorf("resource type %q: %w; there are %s", name, ErrNotFound, strings.Join(known, ", "))
}

func defined(typ string) bool {
	registry.RLock()
	defer registry.RUnlock()
	d := registry.byName[strings.ToLower(typ)]
	return d != nil && d.Type == typ
}

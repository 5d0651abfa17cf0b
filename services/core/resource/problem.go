package resource

import "reflect"

// Problems are those that a spec tells of: of its fields named Problem (a string) and Problems
// (strings), also in structs and lists of structs within it. Whoever publishes such a field needs
// to do nothing else for its problem to be found.
func Problems(spec any) []string { return problems(nil, reflect.ValueOf(spec)) }

func problems(found []string, v reflect.Value) []string {
	switch {
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		for i := range v.Len() {
			found = problems(found, v.Index(i))
		}
	case v.Kind() == reflect.Struct:
		for field, value := range v.Fields() {
			switch {
			case field.Name == "Problem" && value.Kind() == reflect.String && value.Len() > 0:
				found = append(found, value.String())
			case field.Name == "Problems" && value.Type() == reflect.TypeFor[[]string]() && value.CanInterface():
				found = append(found, value.Interface().([]string)...)
			default:
				found = problems(found, value)
			}
		}
	}
	return found
}

// Troubled are the objects of all types that have problems, in the order of their types.
func (s *Store) Troubled() (all []Object[any]) {
	for _, d := range Definitions() {
		for _, o := range s.Objects(d.Type, "") {
			if !o.Troubled.IsZero() {
				all = append(all, o)
			}
		}
	}
	return all
}

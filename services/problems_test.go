package services

import (
	"reflect"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/core/resource"
)

// Every problem in the spec of a resource, wherever the spec has it, is found by doctor. A spec
// that hides one (behind a pointer, in a map, in another type than a string) is refused here.
func TestDoctorFindsEveryProblem(t *testing.T) {
	t.Parallel()
	types := 0
	for _, d := range resource.Definitions() {
		spec := reflect.New(d.Spec()).Elem()
		set, odd := setProblems(spec, map[reflect.Type]bool{})
		for _, field := range odd {
			t.Errorf("%s: the field %s is neither a string nor a list of strings", d.Type, field)
		}
		if set > 0 {
			types++
		}
		if got := resource.Problems(spec.Interface()); len(got) != set {
			t.Errorf("%s: %d problems are set, and %q found", d.Type, set, got)
		}
	}
	if types < 6 {
		t.Errorf("only %d types have problems: files, modules, sysctls and others should", types)
	}
}

// setProblems sets each field that has the name of one, and makes what it is in. Counts of
// problems, which others have, are none.
func setProblems(v reflect.Value, within map[reflect.Type]bool) (set int, odd []string) {
	add := func(v reflect.Value) {
		n, more := setProblems(v, within)
		set, odd = set+n, append(odd, more...)
	}
	switch v.Kind() {
	case reflect.Pointer:
		if within[v.Type()] || !v.CanSet() {
			return 0, nil
		}
		within[v.Type()] = true
		defer delete(within, v.Type())
		v.Set(reflect.New(v.Type().Elem()))
		add(v.Elem())
	case reflect.Slice:
		if within[v.Type()] || !v.CanSet() {
			return 0, nil
		}
		within[v.Type()] = true
		defer delete(within, v.Type())
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		add(v.Index(0))
	case reflect.Map:
		if within[v.Type()] || !v.CanSet() {
			return 0, nil
		}
		within[v.Type()] = true
		defer delete(within, v.Type())
		value := reflect.New(v.Type().Elem()).Elem()
		add(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.New(v.Type().Key()).Elem(), value)
	case reflect.Struct:
		for i := range v.NumField() {
			field, value := v.Type().Field(i), v.Field(i)
			if !strings.HasPrefix(field.Name, "Problem") {
				add(value)
				continue
			}
			switch {
			case value.Kind() == reflect.Int:
			case field.Name == "Problem" && value.Kind() == reflect.String && value.CanSet():
				value.SetString("it is broken")
				set++
			case field.Name == "Problems" && value.Type() == reflect.TypeFor[[]string]() && value.CanSet():
				value.Set(reflect.ValueOf([]string{"it is broken"}))
				set++
			default:
				odd = append(odd, field.Name)
			}
		}
	}
	return set, odd
}

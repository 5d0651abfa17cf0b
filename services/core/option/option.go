// Package option fills in the options that are left out: most are functions of the kernel, which
// tests replace.
package option

import "reflect"

// Default gives an option its value, unless it has one.
func Default[T any](option *T, value T) {
	if reflect.ValueOf(option).Elem().IsZero() {
		*option = value
	}
}

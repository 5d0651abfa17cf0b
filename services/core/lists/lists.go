// Package lists makes lists of others.
package lists

// Of has what each makes of the entries of a list; nil if there are none.
func Of[T, U any](all []T, each func(T) U) (made []U) {
	for _, entry := range all {
		made = append(made, each(entry))
	}
	return made
}

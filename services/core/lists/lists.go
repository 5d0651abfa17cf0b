// Package lists makes lists of others.
package lists

// Some has what each makes of those entries of a list for which it is true; nil if there are none.
func Some[T, U any](all []T, each func(T) (U, bool)) (made []U) {
	for _, entry := range all {
		if one, is := each(entry); is {
			made = append(made, one)
		}
	}
	return made
}

// Of has what each makes of the entries of a list; nil if there are none.
func Of[T, U any](all []T, each func(T) U) (made []U) {
	for _, entry := range all {
		made = append(made, each(entry))
	}
	return made
}

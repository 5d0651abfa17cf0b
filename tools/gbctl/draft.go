package main

import "fmt"

// draftError is the error of an edit that couldn't be applied. The text of the user stays
// in a file, so that it isn't lost.
type draftError struct {
	err  error
	path string
}

func (e *draftError) Error() string { return e.err.Error() + "\n" + e.note() }
func (e *draftError) Unwrap() error { return e.err }
func (e *draftError) note() string  { return fmt.Sprintf("your edited text is in %s", e.path) }

package main

import "fmt"

// draftError is for work of a person that couldn't be brought to its end, and
// that lies in a file now: nothing that was typed is lost.
type draftError struct {
	err  error
	path string
}

func (e *draftError) Error() string { return e.err.Error() + "\n" + e.note() }
func (e *draftError) Unwrap() error { return e.err }
func (e *draftError) note() string  { return fmt.Sprintf("what you have typed is in %s", e.path) }

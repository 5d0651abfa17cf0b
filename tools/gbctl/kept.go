package main

import "fmt"

// keptError is for work of a person that couldn't be brought to its end, and
// that lies in a file now: nothing that was typed is lost.
type keptError struct {
	err  error
	path string
}

func (e *keptError) Error() string { return e.err.Error() + "\n" + e.note() }
func (e *keptError) Unwrap() error { return e.err }
func (e *keptError) note() string  { return fmt.Sprintf("what you have typed is in %s", e.path) }

// Package reason has the codes by which programs tell errors and events apart. Texts are
// for people, and may change; nobody reads them to find out what happened. A code is a
// constant beside what produces it.
package reason

import (
	"errors"
	"net"
	"syscall"
)

// Code is a fixed word, as the reason of a condition in Kubernetes: "DHCPUnanswered".
// "" is unknown.
type Code string

// Codes of errors of the kernel and of Go's resolver, whoever passes them on.
const (
	NoSpace            Code = "NoSpace"
	NetworkUnreachable Code = "NetworkUnreachable"
	NameUnresolved     Code = "NameUnresolved"
)

type coded struct {
	error
	code Code
}

func (c coded) Unwrap() error { return c.error }
func (c coded) Reason() Code  { return c.code }

// With gives an error its code; the text stays.
func With(code Code, err error) error { return coded{err, code} }

// Of is the code of an error, or of the first one that it wraps which has one: made by
// With, or a type with a method Reason.
func Of(err error) Code {
	var own interface{ Reason() Code }
	var lookup *net.DNSError
	switch {
	case errors.As(err, &own):
		return own.Reason()
	case errors.As(err, &lookup):
		return NameUnresolved
	case errors.Is(err, syscall.ENOSPC):
		return NoSpace
	case errors.Is(err, syscall.ENETUNREACH):
		return NetworkUnreachable
	}
	return ""
}

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
)

// Exit codes. Scripts depend on them: the meaning of a number never changes.
const (
	codeOK          = 0
	codeFailed      = 1
	codeUsage       = 2
	codeSome        = 3
	codeUnreachable = 4
	codeDenied      = 5
	codeRefused     = 6
	codeUnhealthy   = 7
	codeInterrupted = 130 // 128 + SIGINT, as shells count
)

// exitError is an error with an exit code.
type exitError struct {
	code int
	err  error // nil: the output already contains the reason
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usagef makes the error of wrong usage that only the command itself can detect.
func usagef(format string, args ...any) error { return exitf(codeUsage, format, args...) }

// exitf makes an error with an exit code.
func exitf(code int, format string, args ...any) error {
	return &exitError{code, fmt.Errorf(format, args...)}
}

// nodeError is the error of one node.
type nodeError struct {
	node string
	err  error
}

// nodeErrors are the errors of the nodes that failed, of total nodes.
type nodeErrors struct {
	failed []nodeError
	total  int
}

func (e *nodeErrors) Error() string {
	return strings.Join(ofEach(e.failed, func(f nodeError) string { return f.node + ": " + f.err.Error() }), "\n")
}

// Is reports context.Canceled if all nodes were cancelled.
func (e *nodeErrors) Is(target error) bool {
	return target == context.Canceled && !slices.ContainsFunc(e.failed, func(f nodeError) bool { return !errors.Is(f.err, target) })
}

// byConnectCode maps the error codes of nodes to exit codes.
var byConnectCode = map[connect.Code]int{
	connect.CodeUnavailable:        codeUnreachable,
	connect.CodeDeadlineExceeded:   codeUnreachable,
	connect.CodeUnauthenticated:    codeDenied,
	connect.CodePermissionDenied:   codeDenied,
	connect.CodeInvalidArgument:    codeRefused,
	connect.CodeFailedPrecondition: codeRefused,
}

func exitCode(err error) int {
	if err == nil {
		return codeOK
	}
	if exit, ok := errors.AsType[*exitError](err); ok {
		return exit.code
	}
	if nodes, ok := errors.AsType[*nodeErrors](err); ok {
		return nodes.code()
	}
	if answer, ok := errors.AsType[*connect.Error](err); ok {
		if code, ok := byConnectCode[answer.Code()]; ok {
			return code
		}
	}
	return codeFailed
}

func (e *nodeErrors) code() int {
	if len(e.failed) < e.total {
		return codeSome
	}
	code := exitCode(e.failed[0].err)
	for _, f := range e.failed[1:] {
		if exitCode(f.err) != code {
			return codeFailed
		}
	}
	return code
}

// draftsIn returns the draft errors in an error.
func draftsIn(err error) (all []*draftError) {
	if nodes, ok := errors.AsType[*nodeErrors](err); ok {
		for _, f := range nodes.failed {
			all = append(all, draftsIn(f.err)...)
		}
	} else if kept, ok := errors.AsType[*draftError](err); ok {
		all = append(all, kept)
	}
	return all
}

// finish prints the error and returns the exit code.
func (a *app) finish(ctx context.Context, err error) int {
	if err == nil {
		return codeOK
	}
	if ctx.Err() != nil || errors.Is(err, context.Canceled) {
		// Ctrl-C needs no error message, but the files that remain do.
		for _, kept := range draftsIn(err) {
			fmt.Fprintln(a.err, kept.note())
		}
		return codeInterrupted
	}
	var exit *exitError
	var nodes *nodeErrors
	switch {
	case errors.As(err, &exit) && exit.err == nil:
	case errors.As(err, &nodes):
		for _, f := range nodes.failed {
			for line := range strings.Lines(f.err.Error()) {
				fmt.Fprintf(a.err, "%s: %s\n", f.node, visible(line))
			}
		}
	default:
		fmt.Fprintln(a.err, painted(a.err, "error:"), err)
	}
	return exitCode(err)
}

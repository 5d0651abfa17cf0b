// Command sandbox runs processes in their own namespaces, with libcontainer.
//
// It is a separate binary because libcontainer needs cgo: its first steps in a new
// namespace are C, before Go's runtime has threads. PID 1 has no cgo. It starts this
// small static program where it needs a sandbox.
//
// The subcommands are a table. `service` makes the sandbox of one of a node's own
// services. `node` runs a whole node from its root filesystem, for clusters whose
// nodes are containers.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"
	// libcontainer starts this program again, as `init`, inside the namespaces;
	// this is what then runs before Go does.
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
)

// initArg is the argument with which libcontainer starts this program inside the new
// namespaces (libcontainer's README, "Container init").
const initArg = "init"

func init() {
	if len(os.Args) > 1 && os.Args[1] == initArg {
		libcontainer.Init() // ends in execve or exit
	}
}

// A command is one thing that this program does.
type command struct {
	name  string
	usage string
	run   func(args []string) error
}

var commands = []command{
	{"node", "node -            run the node that standard input describes as JSON", runNode},
	{insideCommand, insideCommand + " -     the same, in the mount namespace (called by node)", runInside},
	{"service", "service -         make the sandbox of a service, which standard input describes, and leave it to the caller", runService},
	{insideServiceCommand, insideServiceCommand + " -  the same, in the mount namespace (called by service)", runServiceInside},
	{shieldCommand, shieldCommand + " ROOT       cover the host's own settings below ROOT/proc (called by node)", runShield},
	{adoptedCommand, adoptedCommand + " PROGRAM …  make a container of Docker what a node expects, and become its PID 1", runAdopted},
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		if end, ok := errors.AsType[nodeEnd](err); ok {
			os.Exit(int(end))
		}
		fmt.Fprintf(os.Stderr, "sandbox: %v\n", err)
		os.Exit(exitFailed)
	}
}

func run(args []string) error {
	if len(args) > 0 {
		for _, c := range commands {
			if c.name == args[0] {
				return c.run(args[1:])
			}
		}
	}
	text := "usage: sandbox COMMAND …"
	for _, c := range commands {
		text += "\n  " + c.usage
	}
	return errors.New(text)
}

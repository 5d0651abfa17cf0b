package main

import (
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// aside is what a person reads behind an example.
var aside = regexp.MustCompile(`\s{3,}\S.*$`)

// Each command says what it is for, and each example of the help can be typed as
// it is: the command is there, and so are its flags.
func TestHelp(t *testing.T) {
	a := &app{out: io.Discard, err: io.Discard}
	root := a.rootCommand()
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, c := range cmd.Commands() {
			walk(c)
		}
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: what is it for? %q", cmd.CommandPath(), cmd.Short)
		}
		if cmd.Runnable() && !cmd.HasSubCommands() && cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		for line := range strings.Lines(strings.ReplaceAll(cmd.Example, "\\\n", " ")) {
			tryExample(t, line)
		}
	}
	walk(root)
	for name := range readHelp() {
		cmd, rest, err := root.Find(strings.Fields(strings.TrimPrefix(name, "gbctl")))
		if !strings.HasPrefix(name, "$") && (err != nil || len(rest) > 0) {
			t.Errorf("help.yaml has %q, and the command is %s: %v", name, cmd.CommandPath(), err)
		}
	}
}

func tryExample(t *testing.T, line string) {
	t.Helper()
	a := &app{out: io.Discard, err: io.Discard}
	root := a.rootCommand() // flags remember
	text := aside.ReplaceAllString(strings.TrimRight(line, "\n"), "")
	_, rest, ok := strings.Cut(text, "gbctl ")
	if !strings.HasPrefix(text, "  ") || !ok {
		t.Errorf("example %q isn't a command line", line)
		return
	}
	for _, end := range []string{" | ", " > "} {
		rest, _, _ = strings.Cut(rest, end)
	}
	args := words(rest)
	cmd, args, err := root.Find(args)
	if err == nil {
		err = cmd.ParseFlags(args)
	}
	if err == nil && !cmd.HasSubCommands() {
		err = cmd.ValidateArgs(cmd.Flags().Args())
	}
	if err != nil || !cmd.Runnable() {
		t.Errorf("example %q: %v", line, err)
	}
}

// words splits a command line at blanks, but for those between single quotes.
func words(line string) (all []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			all = append(all, part)
		} else {
			all = append(all, strings.Fields(part)...)
		}
	}
	return all
}

package main

import (
	_ "embed"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// helpTexts is the table of all texts that the help shows, by command. Texts whose name
// starts with $ are parts of others.
//
//go:embed help.yaml
var helpTexts []byte

// helpText is the help of a command. Examples are indented when they are shown.
type helpText struct{ Short, Long, Example string }

func readHelp() map[string]helpText {
	texts := map[string]helpText{}
	if err := yaml.Unmarshal(helpTexts, &texts); err != nil {
		panic(err) // a test finds it first
	}
	return texts
}

// pathOf is a command as the user types it, behind gbctl.
func pathOf(cmd *cobra.Command) string { return strings.TrimPrefix(cmd.CommandPath(), "gbctl ") }

// setHelp sets the help of a command and of its subcommands. A command accepts the
// arguments of its usage unless it sets Args.
func setHelp(cmd *cobra.Command, texts map[string]helpText) {
	t := texts[pathOf(cmd)]
	cmd.Short, cmd.Long = t.Short, t.Long
	for name, part := range texts {
		if strings.HasPrefix(name, "$") {
			cmd.Long = strings.ReplaceAll(cmd.Long, name, part.Long)
		}
	}
	if t.Example != "" {
		cmd.Example = "  " + strings.ReplaceAll(t.Example, "\n", "\n  ")
	}
	if cmd.Args == nil {
		cmd.Args = argumentsOf(cmd)
	}
	for _, c := range cmd.Commands() {
		setHelp(c, texts)
	}
}

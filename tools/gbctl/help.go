package main

import (
	_ "embed"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
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

// manCommand writes the help as pages of the manual, whose date is SOURCE_DATE_EPOCH, and as Markdown, and completions.
func manCommand() *cobra.Command {
	cmd := command("man DIR", func(cmd *cobra.Command, args []string) error {
		root, man, shells, reference := cmd.Root(), filepath.Join(args[0], "man"), filepath.Join(args[0], "completions"), filepath.Join(args[0], "reference")
		if err := errors.Join(os.MkdirAll(man, 0o755), os.MkdirAll(shells, 0o755), os.MkdirAll(reference, 0o755)); err != nil {
			return err
		}
		root.DisableAutoGenTag = true // it has the day
		return errors.Join(
			doc.GenMarkdownTree(root, reference), doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "gbctl " + boot.Version}, man),
			root.GenBashCompletionFileV2(filepath.Join(shells, "gbctl"), true), root.GenZshCompletionFile(filepath.Join(shells, "_gbctl")),
			root.GenFishCompletionFile(filepath.Join(shells, "gbctl.fish"), true), root.GenPowerShellCompletionFileWithDesc(filepath.Join(shells, "gbctl.ps1")),
		)
	})
	cmd.Hidden = true
	return cmd
}

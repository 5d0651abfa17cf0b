package main

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manCommand writes the help as pages of the manual, whose date is SOURCE_DATE_EPOCH, and as Markdown, and completions.
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
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
		},
	}
}

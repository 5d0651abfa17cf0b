package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/garboard-os/garboard/image"
	"github.com/spf13/cobra"
)

func extensionsCommand() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use:   "extensions",
		Short: "Make the examples of extensions",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			made, err := image.BuildExtensions(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			for _, name := range slices.Sorted(maps.Keys(made)) {
				dir := filepath.Join(to, name)
				if err := os.RemoveAll(dir); err != nil {
					return err
				}
				if err := os.CopyFS(dir, os.DirFS(made[name])); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), dir)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&to, "to", "out/extensions", "directory to write them to; what it has of the same name is replaced")
	return cmd
}

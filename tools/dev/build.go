package main

import (
	"fmt"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

func buildCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "build",
		Short: "Build kernel, image and components into the cache",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			root, err := prepared(cmd.Context(), out, false)
			if err != nil {
				return err
			}
			made, err := devcluster.Build(cmd.Context(), root, out, image.Build, image.Cloud)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "kernel     %s\ninitramfs  %s\nrootfs     %s\nimages     %s\n", made.Kernel, made.Initramfs, made.RootFS, made.Layout)
			return nil
		},
	}
}

package main

import (
	"fmt"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

func buildCommand() *cobra.Command {
	var metal bool
	build := &cobra.Command{
		Use:   "build",
		Short: "Build kernel, image and components into the cache",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			root, err := repository()
			if err != nil {
				return err
			}
			if err := setup(cmd.Context(), out, false); err != nil {
				return err
			}
			flavour := image.Cloud
			if metal {
				flavour = image.Generic
			}
			made, err := devcluster.Build(cmd.Context(), root, out, image.Build, flavour)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "kernel     %s\ninitramfs  %s\nrootfs     %s\nimages     %s\n", made.Kernel, made.Initramfs, made.RootFS, made.Layout)
			return nil
		},
	}
	build.Flags().BoolVar(&metal, "metal", false, "with the kernel for bare metal, and its drivers")
	return build
}

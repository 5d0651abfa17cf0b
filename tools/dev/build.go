package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/spf13/cobra"
)

func buildCommand() *cobra.Command {
	return &cobra.Command{
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
			made, err := build(cmd.Context(), root, out, image.Build)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "kernel     %s\ninitramfs  %s\nrootfs     %s\nimages     %s\n", made.Kernel, made.Initramfs, made.RootFS, made.Layout)
			return nil
		},
	}
}

// build makes what isn't in the cache yet, and says how long that took.
func build(ctx context.Context, root string, out io.Writer, node image.Builder) (*image.Artifacts, error) {
	start := time.Now()
	made, err := image.BuildAll(ctx, root, out, node, image.Cloud)
	if err == nil {
		fmt.Fprintf(out, "built in %s\n", time.Since(start).Round(100*time.Millisecond))
	}
	return made, err
}

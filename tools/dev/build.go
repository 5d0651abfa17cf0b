package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/image/progress"
	"github.com/spf13/cobra"
)

// estimatesFile in the cache remembers how long each step takes.
const estimatesFile = "durations.json"

// artifacts is everything that a cluster is made of, as paths in the cache.
type artifacts struct {
	*image.Boot
	Components map[string]string // component → directory
	Layout     string            // OCI layout with all images
}

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

// A bootBuild is image.Build, or image.BuildRoot where nodes are containers.
type bootBuild func(ctx context.Context, root string, store *cache.Store, r *progress.Reporter, flavour image.Flavour) (*image.Boot, error)

// build makes what isn't in the cache yet.
func build(ctx context.Context, root string, out io.Writer, boot bootBuild) (*artifacts, error) {
	store, err := cache.Default()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	r := progress.New(out, filepath.Join(store.Dir, estimatesFile))
	made, err := (&components.Builder{Root: root, Store: store, Progress: r}).Build(ctx, components.Names()...)
	if err != nil {
		return nil, err
	}
	booted, err := boot(ctx, root, store, r, image.Cloud)
	if err != nil {
		return nil, err
	}
	layout, err := oci.Build(ctx, store, r, made)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "built in %s\n", time.Since(start).Round(100*time.Millisecond))
	return &artifacts{Boot: booted, Components: made, Layout: layout}, nil
}

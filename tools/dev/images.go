package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/garboard-os/garboard/tools/gbctl/imagebundle"
	"github.com/spf13/cobra"
)

func imagesCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "images",
		Short: "Build the images of a cluster, and write them to one file, as 'gbctl images bundle' does with images of registries",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.ErrOrStderr()
			root, err := prepared(cmd.Context(), out, false)
			if err != nil {
				return err
			}
			made, err := devcluster.Build(cmd.Context(), root, out, image.BuildRoot, image.Cloud)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Dir(output), 0o755); err != nil {
				return err
			}
			if err := bundle(cmd.Context(), made.Layout, config.DefaultImages(), output); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), output)
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "out/images.tar", "file to write")
	return cmd
}

// bundle writes images of a layout to one file. A layout has the images that were built under the names of their
// publishers.
func bundle(ctx context.Context, layout string, images []string, file string) error {
	source := httptest.NewServer(registry.New(layout))
	defer source.Close()
	pulls := imagebundle.Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {source.URL}}}
	return pulls.Write(ctx, images, file)
}

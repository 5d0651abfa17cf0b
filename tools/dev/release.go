package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/garboard-os/garboard/image/version"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/garboard-os/garboard/tools/release"
	"github.com/spf13/cobra"
)

func releaseCommand() *cobra.Command {
	var name, to string
	cmd := &cobra.Command{
		Use:   "release",
		Short: "Make the files of a release",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			begin, ctx, out := time.Now(), cmd.Context(), cmd.ErrOrStderr()
			key := os.Getenv(image.ReleaseKeyVariable)
			if key == "" { // a development key is on one computer: nobody else could compare it
				return fmt.Errorf("%s names no key, and a release is signed: make one with 'gbctl gen release-key', or name the public one of who signs", image.ReleaseKeyVariable)
			}
			r := &release.Release{Dir: to}
			if r.Key, r.Public, err = image.ReadReleaseKey(key); err != nil {
				return err
			}
			if r.Root, err = prepared(ctx, out, false); err != nil {
				return err
			}
			if err := os.Setenv(version.Variable, name); err != nil { // for all that is built
				return err
			}
			for _, part := range []struct {
				what string
				make func() error
			}{
				{"the directory", func() error { return r.Begin(ctx) }},
				{"the changelog and the docs", func() error { return r.Text(ctx) }},
				{fmt.Sprintf("gbctl for %d systems", len(release.Platforms)), func() error { return r.Client(ctx, release.Platforms) }},
				{"the system, its media and the images of a cluster", func() error { return releaseSystem(ctx, out, r) }},
				{"the sums", r.Finish},
			} {
				fmt.Fprintln(out, "making", part.what)
				if err := part.make(); err != nil {
					return err
				}
			}
			if r.Key == nil {
				fmt.Fprintf(out, "not signed: %s has only a public key; openssl pkeyutl -sign -rawin makes SHA256SUMS.sig\n", key)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: %s, made in %s\n", to, r.Name, since(begin))
			return nil
		},
	}
	cmd.Flags().StringVar(&name, "version", "", "release, such as v1.2.3")
	cmd.Flags().StringVarP(&to, "output", "o", "out/release", "directory to write, which doesn't exist yet")
	return cmd
}

// releaseSystem makes what machines boot from, the images of a cluster, and the lists of their software.
func releaseSystem(ctx context.Context, out io.Writer, r *release.Release) error {
	made, err := devcluster.Build(ctx, r.Root, out, image.Build, image.Generic)
	if err != nil {
		return err
	}
	o, err := image.BuildMedia(ctx, r.Root, out, image.Generic)
	if err != nil {
		return err
	}
	netboot := r.System("netboot")
	return errors.Join(
		o.Build(ctx, media.ISO, r.System("amd64.iso")), o.Build(ctx, media.Disk, r.System("amd64.raw.zst")), o.Build(ctx, media.InstallerKind, r.System("amd64_installer.tar")),
		o.Build(ctx, media.PXE, netboot), oci.Pack(netboot, r.System("amd64_netboot.tar")), os.RemoveAll(netboot),
		bundle(ctx, made.Layout, config.DefaultImages(), r.System("amd64_images.tar")),
		listSystem(made.RootFS, r.System("amd64_system.spdx.json")), listImages(r.Name, made.Components, r.System("amd64_images.spdx.json")),
	)
}

// listSystem takes the list of the software out of the root file system.
func listSystem(rootFS, to string) error {
	content, err := os.ReadFile(rootFS)
	if err != nil {
		return err
	}
	tree, err := squashfs.Read(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		return err
	}
	text, err := tree.ReadFile(sbom.File)
	return errors.Join(err, os.WriteFile(to, text, 0o644))
}

// listImages lists the software of all programs that were built for images.
func listImages(name string, components map[string]string, to string) error {
	list := sbom.New(name)
	for _, component := range slices.Sorted(maps.Keys(components)) {
		programs, err := filepath.Glob(filepath.Join(components[component], "*"))
		if err != nil {
			return err
		}
		for _, path := range programs {
			if content, err := os.ReadFile(path); err == nil { // no directory
				list.Program(bytes.NewReader(content))
			}
		}
	}
	text, err := list.Text()
	return errors.Join(err, os.WriteFile(to, text, 0o644))
}

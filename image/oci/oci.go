// Package oci makes the container images that a node runs, and lays them into one directory in the OCI image layout
// (https://github.com/opencontainers/image-spec/blob/main/image-layout.md), from which a registry can serve them.
//
// Everything about them is a table: which images there are and which layers they are stacked from (images.go), what is
// in a layer (images.go), and which tools for mounting and filtering come from Debian's packages (tools.go). The
// programs come from package components. Images that share a layer share its bytes: the six Kubernetes programs are one
// file in one layer. Nothing depends on when, where or by whom it was built, so that two builds give the same digests.
package oci

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
)

const (
	imagesStep = "images"
	searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

	// Two names for an image in an index: the specification's own, and the one that containerd's import looks at first,
	// because the former is by its grammar only a tag.
	refAnnotation        = "org.opencontainers.image.ref.name"
	containerdAnnotation = "io.containerd.image.name"
)

// These are this package's own sources. They are part of the cache keys, so that a change here makes new images without
// anybody having to think of it: making them takes seconds.
var (
	//go:embed images.go
	imagesSource string
	//go:embed layer.go
	layerSource string
	//go:embed oci.go
	ownSource string
)

// Build makes all images and returns the directory with the layout. binaries is what components.Build returned.
func Build(ctx context.Context, store *cache.Store, r *progress.Reporter, binaries map[string]string) (string, error) {
	r.Plan(containerTools.Name, imagesStep)
	tools, err := containerTools.Build(ctx, store, r)
	if err != nil {
		return "", err
	}
	images := imagesOf(binaries)
	inputs := []string{imagesSource, layerSource, ownSource, fmt.Sprintf("%+v", images)}
	// A result's directory is named by the key of all that went into it: as good as hashing its content, and free.
	for _, name := range slices.Sorted(maps.Keys(binaries)) {
		inputs = append(inputs, name, filepath.Base(binaries[name]))
	}
	inputs = append(inputs, filepath.Base(tools))
	return r.Build(ctx, store, imagesStep, inputs, func(ctx context.Context, dir string) error {
		return writeLayout(ctx, dir, images, func(name string) (layer, error) { return layerOf(name, binaries, tools) })
	})
}

// writeLayout fills dir, which exists.
func writeLayout(ctx context.Context, dir string, images []Image, contents func(name string) (layer, error)) error {
	work, err := os.MkdirTemp(dir, ".layers-") // on the same disk; layers are too big for a /tmp in memory
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	finished := map[string]v1.Layer{}
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, image := range images {
		for _, name := range image.Layers {
			if finished[name] != nil {
				continue
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			content, err := contents(name)
			if err == nil {
				finished[name], err = content.pack(filepath.Join(work, name), image.Gzip)
			}
			if err != nil {
				return fmt.Errorf("layer %s: %w", name, err)
			}
		}
		assembled, err := image.assemble(finished)
		if err != nil {
			return fmt.Errorf("image %s: %w", image.Ref, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: assembled, Descriptor: v1.Descriptor{
			Annotations: map[string]string{refAnnotation: image.Ref, containerdAnnotation: image.Ref},
			Platform:    &v1.Platform{OS: "linux", Architecture: "amd64"},
		}})
	}
	if _, err := layout.Write(dir, index); err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	return nil
}

// assemble stacks an image from finished layers.
func (i Image) assemble(finished map[string]v1.Layer) (v1.Image, error) {
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.ConfigFile(image, &v1.ConfigFile{
		Architecture: "amd64",
		OS:           "linux",
		Created:      v1.Time{Time: time.Unix(0, 0).UTC()},
		RootFS:       v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Env:        []string{searchPath},
			User:       i.User,
			Entrypoint: i.Entrypoint,
			Cmd:        i.Cmd,
			WorkingDir: i.WorkingDir,
			OnBuild:    i.OnBuild,
			Labels:     i.Labels,
		},
	})
	if err != nil {
		return nil, err
	}
	for _, name := range i.Layers {
		kind, err := finished[name].MediaType()
		if err != nil {
			return nil, err
		}
		image, err = mutate.Append(image, mutate.Addendum{
			Layer:     finished[name],
			MediaType: kind,
			History:   v1.History{CreatedBy: "garboard " + strings.Join(i.Layers, "+") + ": " + name, Created: v1.Time{Time: time.Unix(0, 0).UTC()}},
		})
		if err != nil {
			return nil, err
		}
	}
	return image, nil
}

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// WriteLayout writes an image to a directory, which exists, in the OCI image layout. A layer's files, or all files
// below a directory, are given by their path in the image: the file on this machine.
func WriteLayout(ctx context.Context, dir string, image Image, layers map[string]map[string]string) error {
	return writeLayout(ctx, dir, []Image{image}, func(name string) (layer, error) { return layer{files: layers[name]}, nil })
}

// WriteArchive writes the same as one file: an archive of the OCI image layout, as tools for registries take it, and as
// docker load does.
func WriteArchive(ctx context.Context, to string, image Image, layers map[string]map[string]string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(to), ".archive-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	dir := filepath.Join(work, "layout")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := WriteLayout(ctx, dir, image, layers); err != nil {
		return err
	}
	if err := listForDocker(dir, image.Ref); err != nil {
		return fmt.Errorf("list the image for docker load: %w", err)
	}
	return Pack(dir, to)
}

// listForDocker adds the list by which docker load finds the image of a layout: each Docker but those with containerd's
// image store reads nothing else (https://github.com/moby/docker-image-spec, "Combined Image JSON + Filesystem
// Changeset Format").
func listForDocker(dir, ref string) error {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return err
	}
	all, err := index.IndexManifest()
	if err != nil {
		return err
	}
	image, err := index.Image(all.Manifests[0].Digest)
	if err != nil {
		return err
	}
	m, err := image.Manifest()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }
	listed := tarball.Descriptor{Config: blob(m.Config.Digest), RepoTags: []string{ref}}
	for _, l := range m.Layers {
		listed.Layers = append(listed.Layers, blob(l.Digest))
	}
	data, err := json.Marshal(tarball.Manifest{listed})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "manifest.json"), data, 0o644)
}

// Pack writes a directory with an OCI image layout as one file. The content decides its bytes.
func Pack(dir, to string) (err error) {
	made, err := os.CreateTemp(filepath.Dir(to), ".archive-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(made.Name()))
		}
	}()
	defer made.Close()
	tree, err := layer{files: map[string]string{"": dir}}.tree()
	if err != nil {
		return err
	}
	if err := errors.Join(tree.WriteTar(made), made.Chmod(0o644), made.Sync()); err != nil {
		return err
	}
	return os.Rename(made.Name(), to)
}

package main

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/random"

	"github.com/garboard-os/garboard/qemu/network/registry"
)

// A file has the images that it is to have, out of all that were built, and with their content: a node asks no registry
// for them.
func TestBundle(t *testing.T) {
	t.Parallel()
	const wanted, other = "registry.k8s.io/pause:1", "ghcr.io/garboard-os/kubelet:1"
	dir := t.TempDir()
	built, err := layout.Write(filepath.Join(dir, "layout"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string]string{}
	for _, name := range []string{wanted, other} {
		made, err := random.Image(1<<10, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := built.AppendImage(made, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name})); err != nil {
			t.Fatal(err)
		}
		layers, err := made.Layers()
		if err != nil {
			t.Fatal(err)
		}
		digest, err := layers[0].Digest()
		if err != nil {
			t.Fatal(err)
		}
		blobs[name] = "blobs/sha256/" + digest.Hex
	}
	file := filepath.Join(dir, "images.tar")
	if err := bundle(t.Context(), string(built), []string{wanted}, file); err != nil {
		t.Fatal(err)
	}
	archive, err := registry.OpenArchive(file)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	index, err := fs.ReadFile(archive, "index.json")
	if err != nil || !strings.Contains(string(index), wanted) || strings.Contains(string(index), other) {
		t.Errorf("%v, %s", err, index)
	}
	if content, err := fs.ReadFile(archive, blobs[wanted]); err != nil || len(content) == 0 {
		t.Errorf("a layer: %d bytes, %v", len(content), err)
	}
	if err := bundle(t.Context(), string(built), []string{"registry.k8s.io/nothing:1"}, file); err == nil {
		t.Error("an image that wasn't built is in the file")
	}
}

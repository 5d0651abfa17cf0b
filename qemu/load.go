package qemu

import (
	"context"
	"errors"
	"io/fs"

	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
)

// loaded is the layout of the images that the user gave to the cluster.
func (d clusterDir) loaded() (layout.Path, error) {
	p, err := layout.FromPath(d.images())
	if errors.Is(err, fs.ErrNotExist) {
		return layout.Write(d.images(), empty.Index)
	}
	return p, err
}

// Load gives an image to the nodes, which can pull it at once. One of the same name goes. Another command that changes
// the cluster is waited for.
func (c *Cluster) Load(ctx context.Context, ref name.Tag, image v1.Image) error {
	release, err := waitFor(ctx, c.Name, func() {})
	if err != nil {
		return err
	}
	defer release()
	p, err := c.dir.loaded()
	if err != nil {
		return err
	}
	if err := p.ReplaceImage(image, match.Name(ref.Name()), layout.WithAnnotations(map[string]string{registry.RefAnnotation: ref.Name()})); err != nil {
		return err
	}
	unused, err := p.GarbageCollect()
	for _, blob := range unused {
		err = errors.Join(err, p.RemoveBlob(blob))
	}
	return err
}

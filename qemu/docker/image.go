package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/moby/moby/client"
)

// initPath is PID 1 in the root filesystem.
const initPath = "usr/sbin/init"

func reference(version string) string { return "garboard-node:" + version }

// Image returns the image of a node. It is made of the root file system (squashfs) and PID 1, and loaded into Docker
// unless it is there. The version identifies both.
func (d *Docker) Image(ctx context.Context, rootfs, program, version string) (ref string, err error) {
	ref = reference(version)
	if _, err := d.api.ImageInspect(ctx, ref); err == nil || !errdefs.IsNotFound(err) {
		return ref, err
	}
	packed, err := os.Open(rootfs)
	if err != nil {
		return "", err
	}
	defer packed.Close()
	info, err := packed.Stat()
	if err != nil {
		return "", err
	}
	tree, err := squashfs.Read(packed, info.Size())
	if err != nil {
		return "", fmt.Errorf("%s: %w", rootfs, err)
	}
	init, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	tree[initPath] = squashfs.Content(init, 0o755)
	if err := d.load(ctx, ref, tree); err != nil {
		return "", fmt.Errorf("docker: load image %s: %w", ref, err)
	}
	return ref, nil
}

// load gives Docker an image with one layer.
func (d *Docker) load(ctx context.Context, ref string, tree squashfs.Tree) error {
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		out, in := io.Pipe()
		go func() { in.CloseWithError(tree.WriteTar(in)) }()
		return out, nil
	}, tarball.WithCompression(compression.None))
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	tag, err := name.NewTag(ref)
	if err != nil {
		return err
	}
	archive, in := io.Pipe()
	go func() { in.CloseWithError(tarball.Write(tag, image, in)) }()
	defer archive.Close()
	answer, err := d.api.ImageLoad(ctx, archive, client.ImageLoadWithQuiet(true))
	if err != nil {
		return err
	}
	defer answer.Close()
	return loaded(answer)
}

// loaded reads the messages of a load, of which one may be an error.
func loaded(answer io.Reader) error {
	for messages := json.NewDecoder(answer); ; {
		var m struct {
			Error string `json:"error"`
		}
		switch err := messages.Decode(&m); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case m.Error != "":
			return errors.New(m.Error)
		}
	}
}

package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/image-spec/identity"
)

// installerNamespace has the image that a system is installed from, while it is needed. No other image is in it.
const installerNamespace = "installer"

// Fetch pulls an image, in place of any earlier one: a tag can name another image by now.
func (c *Containerd) Fetch(ctx context.Context, ref string, report func(done, of int64)) error {
	if err := c.Forget(ctx); err != nil {
		return err
	}
	_, err := c.PullWithProgress(ctx, installerNamespace, ref, false, func(done, total int64) error {
		report(done, total)
		return nil
	})
	return err
}

// Forget removes what Fetch has pulled.
func (c *Containerd) Forget(ctx context.Context) error {
	cl, err := c.Client()
	if err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, installerNamespace)
	all, err := cl.ImageService().List(ctx)
	for _, image := range all {
		err = errors.Join(err, ignoreGone(cl.ImageService().Delete(ctx, image.Name)))
	}
	return err
}

// Files calls use with the files of an image that Fetch has pulled. Their paths lead to no file outside of it.
func (c *Containerd) Files(ctx context.Context, ref string, use func(fs.FS) error) (err error) {
	cl, err := c.Client()
	if err != nil {
		return err
	}
	// The lease keeps the view until it is removed, or until a day has passed.
	ctx, release, err := cl.WithLease(namespaces.WithNamespace(ctx, installerNamespace))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release(context.WithoutCancel(ctx))) }()
	image, err := cl.GetImage(ctx, ref)
	if err != nil {
		return fmt.Errorf("look up image %s: %w", ref, err)
	}
	layers, err := image.RootFS(ctx)
	if err != nil {
		return err
	}
	views := cl.SnapshotService(snapshotter)
	const view = "installer"
	if err := ignoreGone(views.Remove(ctx, view)); err != nil { // of a call that was cut short
		return err
	}
	mounts, err := views.View(ctx, view, identity.ChainID(layers).String())
	if err != nil {
		return fmt.Errorf("files of image %s: %w", ref, err)
	}
	defer func() { err = errors.Join(err, views.Remove(context.WithoutCancel(ctx), view)) }()
	var failure error // which doesn't get the mount's words around it
	err = mount.WithTempMount(ctx, mounts, func(dir string) error {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return err
		}
		defer root.Close()
		failure = use(root.FS())
		return nil
	})
	return errors.Join(failure, err)
}

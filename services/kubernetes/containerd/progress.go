package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/singleflight"
)

const (
	// pullTimeout of one image: 20 GB at 25 Mbit/s. A registry that sends nothing ends a pull before (bounded).
	pullTimeout = 2 * time.Hour
	// progressEvery is how often progress is reported, also if there is none: the caller
	// learns that the pull still runs.
	progressEvery = time.Second
)

// Check finds out whether the node, or a medium in it, has an image or, if not, whether it can be pulled. It asks as
// Pull does.
func (c *Containerd) Check(ctx context.Context, ref string) (digest string, here bool, err error) {
	cl, err := c.Client()
	if err != nil {
		return "", false, err
	}
	for _, namespace := range []string{Namespace, PodNamespace} {
		if image, err := cl.ImageService().Get(namespaces.WithNamespace(ctx, namespace), known(namespace, ref)); err == nil {
			return image.Target.Digest.String(), true, nil
		}
	}
	cfg, err := configuration.Config(c.Store)
	if err != nil {
		return "", false, err
	}
	digest, refused := c.onMedium(ctx, ref, cfg.Machine.Images)
	if digest != "" {
		return digest, true, nil
	}
	from, done := origin{hostsDir: hostsDir, bundle: boot.CABundle, machine: cfg.Machine}.resolver(ctx)
	defer done()
	if from, err = accept(ctx, from, ref, cfg.Machine.Images); err != nil {
		return "", false, pullError(ref, errors.Join(err, refused))
	}
	_, found, err := from.Resolve(ctx, ref)
	if err != nil {
		return "", false, pullError(ref, errors.Join(err, refused))
	}
	return found.Digest.String(), false, nil
}

// PullWithProgress is Pull, and reports how many bytes were fetched of how many. It returns the digest of the image. An
// image for pods gets the name that the kubelet knows it by. The pull ends when report returns an error.
func (c *Containerd) PullWithProgress(ctx context.Context, namespace, ref string, again bool, report func(done, total int64) error) (digest string, err error) {
	if namespace == PodNamespace {
		if ref, err = podImage(ref); err != nil {
			return "", err
		}
	}
	cl, err := c.Client()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(ctx, namespace), pullTimeout)
	defer cancel()
	f := &fetched{store: cl.ContentStore()}
	var refused error
	end := background.Start(ctx, func(reporting context.Context) {
		for sleep.For(reporting, progressEvery) {
			if refused = report(f.count(ctx)); refused != nil {
				cancel() // the pull ends with it
			}
		}
	})
	var image client.Image
	if seen := client.WithImageHandler(images.HandlerFunc(f.handle)); again {
		image, err = c.fromRegistry(ctx, cl, ref, seen)
	} else {
		image, err = c.Pull(ctx, namespace, ref, func(reason.Code, string) {}, seen)
	}
	end()
	switch {
	case refused != nil:
		return "", refused
	case err != nil && ctx.Err() != nil:
		return "", fmt.Errorf("pull image %s within %s: %w", ref, pullTimeout, ctx.Err())
	case err != nil:
		return "", err
	}
	return image.Target().Digest.String(), nil
}

// wishAgain is the pause after a pull that has failed: a registry that is repaired, and a tag that is pushed, are found
// soon.
const wishAgain = 15 * time.Second

// wishes are the images that are pulled in the background, by their names. One that is missing has an error.
type wishes struct {
	pulls   singleflight.Group
	missing sync.Map
}

// ask is why an image isn't here. It is pulled meanwhile.
func (w *wishes) ask(ref string, pull func() error) error {
	w.pulls.DoChan(ref, func() (any, error) {
		err := pull()
		if w.missing.Delete(ref); err != nil {
			w.missing.Store(ref, err)
			time.Sleep(wishAgain)
		}
		return nil, nil
	})
	if err, failed := w.missing.Load(ref); failed {
		return err.(error)
	}
	return reason.With(Pulling, fmt.Errorf("image %s is being pulled", ref))
}

// Have is nil once the node has an image. Until then it is why not, after what goes on without it, and the image is
// pulled in the background, again and again for as long as Have is called.
func (c *Containerd) Have(ctx context.Context, namespace, ref, instead string) error {
	cl, err := c.Client()
	if err != nil {
		return err
	}
	ref = known(namespace, ref)
	if _, err = cl.ImageService().Get(namespaces.WithNamespace(ctx, namespace), ref); errdefs.IsNotFound(err) {
		err = c.wishes.ask(ref, func() error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullTimeout)
			defer cancel()
			return dag.Guard(c.Logs.Logger(ID), func() error {
				_, err := c.Pull(ctx, namespace, ref, func(reason.Code, string) {})
				return err
			})
		})
	}
	if err != nil {
		return reason.With(cmp.Or(reason.Of(err), ImagePullFailed), fmt.Errorf("%s: %w", instead, err))
	}
	return nil
}

// fetched counts what a pull has fetched.
type fetched struct {
	store content.Store

	mu    sync.Mutex // guards parts
	parts []ocispec.Descriptor
}

// handle is called for each part of the image, once it is known.
func (f *fetched) handle(_ context.Context, part ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.parts = append(f.parts, part)
	return nil, nil
}

func (f *fetched) count(ctx context.Context) (done, total int64) {
	f.mu.Lock()
	parts := slices.Clone(f.parts)
	f.mu.Unlock()
	for _, part := range parts {
		total += part.Size
		if status, err := f.store.Status(ctx, remotes.MakeRefKey(ctx, part)); err == nil {
			done += status.Offset
		} else if _, err := f.store.Info(ctx, part.Digest); err == nil {
			done += part.Size
		}
	}
	return done, total
}

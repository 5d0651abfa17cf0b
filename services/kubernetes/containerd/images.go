package containerd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/machine"
)

// ErrImageInUse: a container, or the configuration, needs the image.
var ErrImageInUse = errors.New("image in use")

// maxRemoved bounds the images of one call.
const maxRemoved = 256

// RemoveImages removes images of a namespace by name or digest, all of them or none, and returns
// the names that they had. containerd frees their space shortly afterwards.
func (c *Containerd) RemoveImages(ctx context.Context, namespace string, refs []string) (removed []string, err error) {
	if len(refs) == 0 || len(refs) > maxRemoved {
		return nil, fmt.Errorf("%d images are given: must be 1 to %d: %w", len(refs), maxRemoved, errdefs.ErrInvalidArgument)
	}
	cl, err := c.Client()
	if err != nil {
		return nil, err
	}
	ctx = namespaces.WithNamespace(ctx, namespace)
	images, err := cl.ImageService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	digests := map[string]string{}
	for _, image := range images {
		digests[image.Name] = image.Target.Digest.String()
	}
	users, err := c.imageUsers(ctx, cl, namespace)
	if err != nil {
		return nil, err
	}
	names, err := removable(digests, users, refs)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := cl.ImageService().Delete(ctx, name); ignoreGone(err) != nil {
			return removed, fmt.Errorf("remove image %s: %w", name, err)
		}
		removed = append(removed, name)
	}
	return removed, nil
}

// imageUsers says by whom images are used, by their names. A container that has ended may be
// started again.
func (c *Containerd) imageUsers(ctx context.Context, cl *client.Client, namespace string) (map[string]string, error) {
	cfg, err := machine.Config(c.Store)
	if err != nil {
		return nil, err
	}
	users := map[string]string{config.DefaultPauseImage: "every pod"}
	if namespace == Namespace {
		users = map[string]string{cfg.Machine.Kubelet.Image: "the configuration (machine.kubelet.image)"}
		if cfg.Machine.Type.ControlPlane() {
			users[cfg.Cluster.Etcd.Image] = "the configuration (cluster.etcd.image)"
		}
	}
	all, err := cl.Containers(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	for _, container := range all {
		info, err := container.Info(ctx, client.WithoutRefreshedMetadata)
		switch {
		case errdefs.IsNotFound(err): // gone meanwhile
		case err != nil:
			return nil, fmt.Errorf("container %s: %w", container.ID(), err)
		case info.Labels[LabelPod] != "":
			users[info.Image] = "pod " + info.Labels[LabelPodNamespace] + "/" + info.Labels[LabelPod]
		default:
			users[info.Image] = "container " + info.ID
		}
	}
	return users, nil
}

// removable are the names of the images that refs select. The CRI gives an image several names,
// and a container has one of them: an image is in use with all its names, and goes with all.
func removable(digests, users map[string]string, refs []string) (names []string, err error) {
	user := map[string]string{} // by digest
	for name, who := range users {
		if digest, ok := digests[name]; ok {
			user[digest] = who
		}
	}
	var errs []error
	for _, ref := range refs {
		digest, found := digests[ref]
		if !found && strings.Contains(ref, ":") {
			digest = ref
		}
		var its []string
		for name, d := range digests {
			if d == digest {
				its = append(its, name)
			}
		}
		switch who := user[digest]; {
		case len(its) == 0:
			errs = append(errs, fmt.Errorf("image %q: %w", ref, errdefs.ErrNotFound))
		case who != "":
			errs = append(errs, fmt.Errorf("%w: %s, by %s", ErrImageInUse, ref, who))
		default:
			names = append(names, its...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), errors.Join(errs...)
}

package containerd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
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
	cfg, err := configuration.Config(c.Store)
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

// What the node's own containers run is unpacked in the namespace of pods. A layer that a pod has, too, is on the disk,
// is unpacked, and is in memory once: the kubelet and kube-apiserver are one program. containerd keeps the layers of
// each namespace for themselves otherwise. Images and containers stay in the node's own namespace. Only they say what
// runs: what a pod pulls never takes the place of what was verified, as layers are named by their content.

// kept keeps the snapshot of a container in a namespace where containerd doesn't see the container.
var kept = snapshots.WithLabels(map[string]string{"containerd.io/gc.root": "a container of the node"})

// ofPods is an interceptor for that: all calls for snapshots of the node's own namespace are for that of pods.
func ofPods(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, call grpc.UnaryInvoker, options ...grpc.CallOption) error {
	if namespace, _ := namespaces.Namespace(ctx); namespace == Namespace && strings.HasPrefix(method, "/containerd.services.snapshots.") {
		headers, _ := metadata.FromOutgoingContext(ctx)
		headers.Set(namespaces.GRPCHeader, PodNamespace)
		headers.Delete(leases.GRPCHeader) // a lease keeps what is in its own namespace
		ctx = metadata.NewOutgoingContext(ctx, headers)
	}
	return call(ctx, method, request, answer, conn, options...)
}

// unpack unpacks an image, unless it is.
func unpack(ctx context.Context, cl *client.Client, img client.Image) error {
	if unpacked, err := img.IsUnpacked(ctx, snapshotter); unpacked || err != nil {
		return err
	}
	if namespace, _ := namespaces.Namespace(ctx); namespace == Namespace {
		return share(ctx, cl, img)
	}
	return img.Unpack(ctx, snapshotter)
}

// share makes an image of the node known to the namespace of pods, by its digest, and unpacks it there. Its content
// isn't copied.
func share(ctx context.Context, cl *client.Client, img client.Image) error {
	pods, release, err := cl.WithLease(namespaces.WithNamespace(ctx, PodNamespace))
	if err != nil {
		return err
	}
	defer release(context.WithoutCancel(pods))
	store := img.ContentStore()
	tell := images.HandlerFunc(func(_ context.Context, part ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		from, err := store.ReaderAt(ctx, part)
		if err == nil {
			defer from.Close()
			err = content.WriteBlob(pods, store, part.Digest.String(), content.NewReader(from), part)
		}
		return nil, err
	})
	parts := images.FilterPlatforms(images.ChildrenHandler(store), platforms.Default())
	if err := images.Walk(ctx, images.Handlers(tell, parts), img.Target()); err != nil {
		return err
	}
	if err := nameByDigest(pods, cl, img); err != nil {
		return err
	}
	return img.Unpack(pods, snapshotter)
}

package api

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"
	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// containerdPatience is for a containerd that hangs: the API must not.
const containerdPatience = 10 * time.Second

func noContainerd() error {
	return failed(connect.CodeUnavailable, "containerd isn't part of this node")
}

// containerdNamespace has the system's containers or those of Kubernetes.
func containerdNamespace(kubernetes bool) string {
	if kubernetes {
		return containerd.PodNamespace
	}
	return containerd.Namespace
}

// withContainerd calls do with a client in one of the two namespaces.
func withContainerd(ctx context.Context, ctrd *containerd.Containerd, kubernetes bool, do func(ctx context.Context, cl *client.Client, namespace string) error) error {
	if ctrd == nil {
		return noContainerd()
	}
	cl, err := ctrd.Client()
	if err != nil {
		return failed(connect.CodeUnavailable, "containerd doesn't answer: %w; see gbctl service containerd", err)
	}
	ctx, cancel := context.WithTimeout(ctx, containerdPatience)
	defer cancel()
	namespace := containerdNamespace(kubernetes)
	return do(namespaces.WithNamespace(ctx, namespace), cl, namespace)
}

// Containers lists pods with their containers below them, or the
// system's containers.
func (s *nodeService) Containers(ctx context.Context, req *connect.Request[apiv1.ContainersRequest]) (*connect.Response[apiv1.ContainersResponse], error) {
	var all []containerOf
	err := withContainerd(ctx, s.opts.Containerd, req.Msg.GetKubernetes(), func(ctx context.Context, cl *client.Client, namespace string) error {
		found, err := cl.Containers(ctx)
		if err != nil {
			return failed(connect.CodeUnavailable, "list containers: %w", err)
		}
		for _, c := range found {
			info, err := c.Info(ctx, client.WithoutRefreshedMetadata)
			if err != nil {
				continue // gone meanwhile
			}
			running, pid := false, uint32(0)
			if task, err := c.Task(ctx, nil); err == nil {
				status, err := task.Status(ctx)
				running, pid = err == nil && status.Status == client.Running, task.Pid()
			}
			all = append(all, describeContainer(namespace, info.ID, info.Image, info.Labels, running, pid))
		}
		return nil
	})
	slices.SortFunc(all, func(a, b containerOf) int {
		return cmp.Or(cmp.Compare(a.pod, b.pod), cmp.Compare(a.uid, b.uid), cmp.Compare(a.order, b.order), cmp.Compare(a.msg.GetId(), b.msg.GetId()))
	})
	containers := lists.Of(all, func(c containerOf) *apiv1.Container { return c.msg })
	return connect.NewResponse(&apiv1.ContainersResponse{Containers: containers}), err
}

// containerOf is a container with what it is sorted by.
type containerOf struct {
	pod, uid string
	order    int // a pod's sandbox comes before its containers
	msg      *apiv1.Container
}

// describeContainer names a container as Kubernetes' users know it.
func describeContainer(namespace, id, image string, labels map[string]string, running bool, pid uint32) containerOf {
	c := containerOf{msg: &apiv1.Container{Namespace: namespace, Id: id, Image: image, Pid: pid}}
	if !running {
		c.msg.Pid = 0
	}
	pod, words := labels[containerd.LabelPodNamespace]+"/"+labels[containerd.LabelPod], map[bool]string{true: "CONTAINER_RUNNING", false: "CONTAINER_EXITED"}
	switch {
	case labels[containerd.LabelPod] == "":
	case labels[containerd.LabelKind] == containerd.KindSandbox:
		c.pod, c.uid = pod, labels[containerd.LabelPodUID]
		c.msg.Id, words = pod, map[bool]string{true: "SANDBOX_READY", false: "SANDBOX_NOTREADY"}
	default:
		c.pod, c.uid, c.order = pod, labels[containerd.LabelPodUID], 1
		c.msg.Id, c.msg.InPod = pod+":"+labels[containerd.LabelContainer], true
	}
	c.msg.Status = words[running]
	return c
}

// imageService is the images of containerd.
type imageService struct{ opts Options }

// Remove removes images that nothing uses.
func (s *imageService) Remove(ctx context.Context, req *connect.Request[apiv1.RemoveImagesRequest]) (*connect.Response[apiv1.RemoveImagesResponse], error) {
	res := &apiv1.RemoveImagesResponse{}
	return connect.NewResponse(res), withContainerd(ctx, s.opts.Containerd, req.Msg.GetKubernetes(), func(ctx context.Context, _ *client.Client, namespace string) (err error) {
		res.Removed, err = s.opts.Containerd.RemoveImages(ctx, namespace, req.Msg.GetImages())
		switch {
		case err == nil:
			return nil
		case errdefs.IsInvalidArgument(err):
			return connect.NewError(connect.CodeInvalidArgument, err)
		case errdefs.IsNotFound(err):
			return failed(connect.CodeNotFound, "nothing was removed from namespace %s: %w; see gbctl images -k for those of Kubernetes, and gbctl images --node for those of the system", namespace, err)
		case errors.Is(err, containerd.ErrImageInUse):
			return failed(connect.CodeFailedPrecondition, "nothing was removed from namespace %s: %w", namespace, err)
		}
		return failed(connect.CodeUnavailable, "containerd: %w; removed by then: %q", err, res.Removed)
	})
}

// List lists what containerd has.
func (s *imageService) List(ctx context.Context, req *connect.Request[apiv1.ImagesRequest]) (*connect.Response[apiv1.ImagesResponse], error) {
	res := &apiv1.ImagesResponse{}
	return connect.NewResponse(res), withContainerd(ctx, s.opts.Containerd, req.Msg.GetKubernetes(), func(ctx context.Context, cl *client.Client, namespace string) error {
		found, err := cl.ListImages(ctx)
		if err != nil {
			return failed(connect.CodeUnavailable, "list images: %w", err)
		}
		for _, image := range found {
			size, _ := image.Size(ctx) // what isn't whole has none
			res.Images = append(res.Images, &apiv1.ContainerImage{
				Namespace: namespace, Name: image.Name(), Digest: image.Target().Digest.String(), Size: uint64(max(size, 0)),
				Created: timestamppb.New(image.Metadata().CreatedAt),
			})
		}
		slices.SortFunc(res.Images, func(a, b *apiv1.ContainerImage) int { return cmp.Compare(a.GetName(), b.GetName()) })
		return nil
	})
}

// Pull pulls an image for a person, or for an operation on another node. The pull ends with the call.
func (s *imageService) Pull(ctx context.Context, req *connect.Request[apiv1.PullImageRequest], stream *connect.ServerStream[apiv1.PullImageProgress]) error {
	image := req.Msg.GetImage()
	switch {
	case image == "":
		return failed(connect.CodeInvalidArgument, "the request names no image")
	case s.opts.Containerd == nil:
		return noContainerd()
	}
	digest, err := s.opts.Containerd.PullWithProgress(ctx, containerdNamespace(req.Msg.GetKubernetes()), image, req.Msg.GetAgain(), func(done, total int64) error {
		return stream.Send(&apiv1.PullImageProgress{Done: uint64(done), Total: uint64(total)})
	})
	if err != nil {
		code := connect.CodeUnavailable
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			code = connect.CodeDeadlineExceeded
		case errdefs.IsNotFound(err):
			code = connect.CodeNotFound
		}
		return connect.NewError(code, err)
	}
	return stream.Send(&apiv1.PullImageProgress{Digest: digest})
}

const (
	// maxChecked bounds the images of one call, and checksAtOnce the questions to registries at a time.
	maxChecked   = 256
	checksAtOnce = 16
	// checkTimeout is for all images of a call: less than what gbctl waits, so that it learns which ones had no answer.
	checkTimeout = 20 * time.Second
)

// Check finds out which images can be had.
func (s *imageService) Check(ctx context.Context, req *connect.Request[apiv1.CheckImagesRequest], stream *connect.ServerStream[apiv1.ImageCheck]) error {
	images := req.Msg.GetImages()
	switch {
	case len(images) > maxChecked:
		return failed(connect.CodeInvalidArgument, "the request names %d images, of at most %d", len(images), maxChecked)
	case s.opts.Containerd == nil:
		return noContainerd()
	case len(images) == 0:
		cfg, err := configuration.Config(s.opts.Store)
		if err != nil {
			return failed(connect.CodeFailedPrecondition, "the node has no configuration: name the images")
		}
		images = cfg.Images()
	}
	checks := make([]*apiv1.ImageCheck, len(images))
	bounded, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	var all errgroup.Group
	all.SetLimit(checksAtOnce)
	for i, image := range images {
		all.Go(func() error {
			digest, here, err := s.opts.Containerd.Check(bounded, image)
			if checks[i] = (&apiv1.ImageCheck{Image: image, Here: here, Digest: digest}); err != nil {
				checks[i].Error = err.Error()
			}
			return nil
		})
	}
	_ = all.Wait() // each check has its own error
	for _, check := range checks {
		if err := stream.Send(check); err != nil {
			return err
		}
	}
	return nil
}

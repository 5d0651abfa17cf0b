package containerd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"

	"github.com/containerd/containerd/api/services/tasks/v1"
	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/garboard-os/garboard/services/core/dag"
)

// PodNamespace is where the kubelet has its pods run.
const PodNamespace = "k8s.io"

// Labels by which containerd's CRI plugin tells what a container is. A pod is held
// together by one of KindSandbox.
const (
	LabelKind         = "io.cri-containerd.kind"
	KindSandbox       = "sandbox"
	LabelPodNamespace = "io.kubernetes.pod.namespace"
	LabelPod          = "io.kubernetes.pod.name"
	LabelPodUID       = "io.kubernetes.pod.uid"
	LabelContainer    = "io.kubernetes.container.name"
)

// StopPods asks all containers of Kubernetes to end, in their own way, and returns once
// they have. The kubelet must not run: it would start them again. Their sandboxes stay,
// with the network that an orderly end may need.
func (c *Containerd) StopPods(ctx context.Context) error {
	cl, err := c.Client()
	if err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, PodNamespace)
	all, err := cl.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list the containers of Kubernetes: %w", err)
	}
	return stopAll(ctx, all, c.Logs.Logger(ID))
}

// Kill ends a container of a pod at once. The kubelet starts it again.
func (c *Containerd) Kill(ctx context.Context, container string) error {
	cl, err := c.Client()
	if err == nil {
		_, err = cl.TaskService().Kill(namespaces.WithNamespace(ctx, PodNamespace), &tasks.KillRequest{ContainerID: container, Signal: uint32(syscall.SIGKILL)})
	}
	return err
}

func stopAll(ctx context.Context, all []client.Container, log *slog.Logger) error {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, container := range all {
		wg.Go(func() {
			errs[i] = dag.Guard(log, func() error { return stopContainer(ctx, container) })
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func stopContainer(ctx context.Context, container client.Container) error {
	labels, err := container.Labels(ctx)
	if err != nil || labels[LabelKind] == KindSandbox {
		return ignoreGone(err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return ignoreGone(err) // it doesn't run
	}
	ended, err := task.Wait(ctx)
	if err != nil {
		return ignoreGone(err)
	}
	if err := task.Kill(ctx, syscall.SIGTERM); err != nil {
		return ignoreGone(err)
	}
	select {
	case status := <-ended:
		if err := status.Error(); err != nil { // containerd is gone, and the container may run on
			return fmt.Errorf("wait for container %s (%s) to end: %w", container.ID(), labels[LabelPod], err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("container %s (%s) hasn't ended: %w", container.ID(), labels[LabelPod], ctx.Err())
	}
}

func ignoreGone(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

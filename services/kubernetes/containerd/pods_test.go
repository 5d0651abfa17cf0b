package containerd

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
)

// container is one of Kubernetes' as containerd's client shows it, and its task.
type container struct {
	client.Container
	id     string
	labels func() (map[string]string, error)
	ended  chan client.ExitStatus
	signal syscall.Signal // what it got
}

func (c *container) ID() string { return c.id }

func (c *container) Labels(context.Context) (map[string]string, error) { return c.labels() }

func (c *container) Task(context.Context, cio.Attach) (client.Task, error) {
	return containerTask{c: c}, nil
}

type containerTask struct {
	client.Task
	c *container
}

func (t containerTask) Wait(context.Context) (<-chan client.ExitStatus, error) { return t.c.ended, nil }

func (t containerTask) Kill(_ context.Context, s syscall.Signal, _ ...client.KillOpts) error {
	t.c.signal = s
	return nil
}

func labelled(labels map[string]string) func() (map[string]string, error) {
	return func() (map[string]string, error) { return labels, nil }
}

// What hasn't ended is told, and one container's trouble is no other's.
func TestStopPods(t *testing.T) {
	t.Parallel()
	pod := map[string]string{LabelPod: "web"}
	ends := func(err error) chan client.ExitStatus {
		ended := make(chan client.ExitStatus, 1)
		ended <- *client.NewExitStatus(0, time.Now(), err)
		return ended
	}
	lost := errors.New("containerd is gone")
	good := &container{id: "good", labels: labelled(pod), ended: ends(nil)}
	sandbox := &container{id: "sandbox", labels: labelled(map[string]string{LabelKind: KindSandbox})}
	gone := &container{id: "gone", labels: func() (map[string]string, error) { return nil, errdefs.ErrNotFound }}
	log := slog.New(slog.DiscardHandler)
	if err := stopAll(t.Context(), []client.Container{good, sandbox, gone}, log); err != nil {
		t.Error(err)
	}
	if good.signal != syscall.SIGTERM || sandbox.signal != 0 {
		t.Errorf("signals %v, and the sandbox got %v", good.signal, sandbox.signal)
	}

	good.ended = ends(nil)
	unknown := &container{id: "unknown", labels: labelled(pod), ended: ends(lost)}
	broken := &container{id: "broken", labels: func() (map[string]string, error) { panic("out of range") }}
	err := stopAll(t.Context(), []client.Container{broken, unknown, good}, log)
	if !errors.Is(err, lost) || !strings.Contains(err.Error(), "container unknown (web)") || !strings.Contains(err.Error(), "out of range") || strings.Contains(err.Error(), "good") {
		t.Error(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	stays := &container{id: "stays", labels: labelled(pod), ended: make(chan client.ExitStatus)}
	if err := stopAll(ctx, []client.Container{stays}, log); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "stays (web) hasn't ended") {
		t.Error(err)
	}
}

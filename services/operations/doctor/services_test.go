package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// ends is a service that starts, says what is in a file of a real program's last
// words, and ends as the runner of containers tells it.
func (n *node) ends(id, words string) func(context.Context, *dag.Handle) error {
	n.t.Helper()
	data, err := os.ReadFile("testdata/" + words)
	n.must(err)
	return func(_ context.Context, h *dag.Handle) error {
		h.Started(fmt.Sprintf("Started task %s (PID 42) for container %s", id, id))
		out := n.logs.Writer(id)
		defer out.Close()
		fmt.Fprintf(out, "%s", data)
		return fmt.Errorf("container %s ended with status %d", id, 1)
	}
}

// ill is a health check that never succeeds.
func unhealthy(err string) *dag.Health {
	return &dag.Health{Check: func(context.Context) error { return errors.New(err) }, Period: 10 * time.Millisecond}
}

func TestServiceFailing(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		services["containerd"].Run = func(context.Context, *dag.Handle) error {
			fmt.Fprintln(n.logs.Writer("containerd"), `time="2026-11-21T15:00:00Z" level=fatal msg="Fatal error"`)
			return errors.New("containerd ended before it served /run/containerd/containerd.sock: exit status 1")
		}
	})
	n.finds("service-failing", failure, "containerd ended before it served", "level=fatal", "gbctl logs")
	n.finds("kubelet-not-running", info, "Follows from service-failing", `service "containerd" to be "up"`)
}

// Between two tries a service looks as if it only came up.
func TestServiceFailingBetweenTries(t *testing.T) {
	t.Parallel()
	again := make(chan struct{}, 1)
	n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
		first := true
		services["containerd"].Run = func(ctx context.Context, _ *dag.Handle) error {
			if first {
				first = false
				return errors.New("it broke")
			}
			again <- struct{}{}
			<-ctx.Done()
			return nil
		}
	})
	<-again
	n.finds("service-failing", failure, "it broke", "[Starting]")
}

func TestServiceRestarting(t *testing.T) {
	t.Parallel()
	for name, passes := range map[string]func(*node){
		"for a time": func(n *node) { n.later(flapping) },
		// By hand, or with another configuration.
		"until it is started anew": func(n *node) {
			n.must(n.graph.Stop(n.t.Context(), "containerd"))
			n.must(n.graph.Start(n.t.Context(), "containerd"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			end := make(chan struct{})
			n := start(t, config.Worker, func(n *node, services map[string]*dag.Service) {
				services["containerd"].Run = func(ctx context.Context, h *dag.Handle) error {
					h.Started("Started process containerd (PID 7)")
					select {
					case <-end:
						return errors.New("containerd ended by itself: signal: killed")
					case <-ctx.Done():
						return nil
					}
				}
			})
			for range flaps {
				end <- struct{}{}
				_ = n.graph.Start(t.Context(), "containerd") // ends the pause; there may be none yet
			}
			eventually.That(t, 4*patience, "containerd is back", func() error {
				if st, _ := n.graph.Status("containerd"); !st.Up || st.Restarts < flaps {
					return errors.New(st.Message)
				}
				return nil
			})
			n.finds("service-restarting", warning, "containerd", "3 times", "signal: killed")
			passes(n)
			n.healthy()
		})
	}
}

func TestServiceStopped(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.must(n.graph.Stop(t.Context(), "kubelet"))
	n.finds("service-stopped", failure, "Service kubelet was stopped", "gbctl -n ADDRESS service kubelet start")
	n.lacks("kubelet-not-running")
	n.must(n.graph.Start(t.Context(), "kubelet"))
	n.healthy()
}

// A service whose restart waits for an image goes on, and so does a static pod.
func TestImageOfARestart(t *testing.T) {
	t.Parallel()
	var lacking atomic.Pointer[error]
	lacking.Store(new(error))
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		services["kubelet"].Lacks = func(context.Context) error { return *lacking.Load() }
		n.have = func(_ context.Context, image, _ string) error {
			return reason.With(containerd.RegistryDenied, errors.New("pull image "+image+": 401"))
		}
	})
	lack := func(code reason.Code, text string) {
		err := reason.With(code, errors.New(text))
		lacking.Store(&err)
		if n.graph.Restart(t.Context(), "kubelet") == nil {
			t.Error("it restarts")
		}
	}
	lack(containerd.Pulling, "goes on with kubelet:1: image kubelet:2 is being pulled")
	n.finds("image-pulling", info, "Service kubelet waits for its image", "goes on with kubelet:1", "kubelet:2")
	n.lacks("image-pull-failing")
	lack(containerd.ImageNotFound, "goes on with kubelet:1: pull image kubelet:3: not found")
	n.finds("image-pull-failing", failure, "service kubelet", "The former one goes on", "kubelet:3: not found", "Correct the image's name and tag")
	n.lacks("image-pulling")
	lack(containerd.ImageSick, "goes on with kubelet:1: image kubelet:4 doesn't work: no such file")
	n.finds("image-sick", failure, "The new image for service kubelet doesn't work. The former one goes on.", "kubelet:4 doesn't work: no such file.", "Correct the image")
	n.lacks("image-pull-failing", "image-pulling")
	lacking.Store(new(error))
	n.must(n.graph.Restart(t.Context(), "kubelet"))
	n.healthy()
	next := *n.config
	next.Cluster.Scheduler.Image = "registry.k8s.io/scheduler:v1.36.1"
	n.must(configuration.Configs.Put(n.store.As(configuration.ID), configuration.ConfigID, &next))
	n.finds("image-pull-failing", failure, "static pod kube-scheduler", "scheduler:v1.36.1: 401", "machine.registries.config")
}

func TestImagePulling(t *testing.T) {
	t.Parallel()
	there := make(chan struct{})
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		services["etcd"].Prepare = func(ctx context.Context, h *dag.Handle) error {
			h.EventOf(containerd.Pulling, n.config.Cluster.Etcd.Image)
			select {
			case <-there:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	})
	n.finds("image-pulling", info, n.config.Cluster.Etcd.Image, "service etcd")
	n.finds("etcd-not-running", info, "Follows from image-pulling")
	close(there)
	n.healthy()
}

// Package containerd shows that real registries lead to these codes.
func TestImagePullFailing(t *testing.T) {
	t.Parallel()
	for code, why := range map[reason.Code]string{
		containerd.ImageNotFound: "no image with this name", containerd.RegistryUnanswered: "doesn't answer", containerd.RegistryUnresolved: "can't be resolved",
		containerd.RegistryDenied: "requires authentication", containerd.RegistryUntrusted: "certificate isn't accepted", containerd.RegistryPlainHTTP: "plain HTTP",
		containerd.ImagePullFailed: "doesn't serve the image",
	} {
		n := start(t, config.Init, func(_ *node, services map[string]*dag.Service) {
			services["etcd"].Prepare = func(context.Context, *dag.Handle) error { return reason.With(code, errors.New("some text")) }
		})
		n.finds("image-pull-failing", failure, "service etcd", "some text", why)
		n.finds("etcd-not-running", info, "Follows from image-pull-failing")
	}
}

// Of a pod while no API server serves, only the kubelet's log knows.
func TestImageOfPodFailing(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.kubelet.body = podList(staticPod(apiServer, unpulled), staticPod(controllerManager, running), staticPod(scheduler, running))
		n.api.fail("/readyz", notReady)
	})
	n.finds("image-pull-failing", failure, "kube-system/kube-apiserver", "ImagePullBackOff", "no image with this name")
	n.finds("apiserver-not-running", info, "Follows from image-pull-failing", "[-]etcd failed")

	n = start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.kubelet.set(401, "Unauthorized")
		n.api.fail("/readyz", notReady)
		kubeletLog(n, time.Now())
	})
	n.finds("image-pull-failing", failure, "pod kube-apiserver", "logs kubelet", "no image with this name")
	if f := n.finds("apiserver-not-running", info); strings.Contains(f.Next, "should pass") {
		t.Errorf("it is told to pass: %s", f.Next)
	}

	// What the kubelet told while it was asked by an API server is older than its log.
	n = start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.kubelet.body = podList(staticPod(apiServer, running), staticPod(controllerManager, running), staticPod(scheduler, running))
		n.api.fail("/readyz", notReady)
		kubeletLog(n, time.Now())
	})
	n.finds("image-pull-failing", failure, "pod kube-apiserver", "logs kubelet", "no image with this name")

	n = start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.kubelet.set(401, "Unauthorized")
		n.api.fail("/readyz", notReady)
		kubeletLog(n, time.Now().Add(-2*syncing))
	})
	n.lacks("image-pull-failing")
}

// kubeletLog says, as the kubelet does, that it can't have the API server's image.
func kubeletLog(n *node, at time.Time) {
	fmt.Fprintf(n.logs.Writer("kubelet"), `{"ts":%d.7,"caller":"kubelet/pod_workers.go:1338","msg":"Error syncing pod, skipping","pod":{"name":"kube-apiserver-n1","namespace":"kube-system"},`+
		`"err":"failed to \"StartContainer\" for \"kube-apiserver\" with ErrImagePull: \"rpc error: code = NotFound desc = failed to pull and unpack image: not found\""}`+"\n", at.UnixMilli())
}

// Whatever needs a service that was stopped by hand follows from that, at once and in the first minutes.
func TestStoppedServiceIsTheCause(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
		n.etcd.ready.set(0, "")
		n.api.fail("/readyz", notReady)
	})
	n.age.Store(0)
	n.must(n.graph.Stop(t.Context(), "etcd"))
	n.finds("service-stopped", failure, "Service etcd was stopped", "gbctl -n ADDRESS service etcd start")
	n.finds("apiserver-not-running", info, "Follows from service-stopped", "[-]etcd failed")
	n.finds("endpoint-not-answering", info, "Follows from service-stopped")
	for _, f := range n.diagnose() {
		if f.Severity != info && f.Id != "service-stopped" {
			t.Errorf("a second root:\n%s", show(f))
		}
	}

	n = start(t, config.Worker, func(_ *node, services map[string]*dag.Service) {
		services["kubelet"].Health = unhealthy("connection refused")
	})
	n.finds("kubelet-not-running", info, "connection refused")
	n.must(n.graph.Stop(t.Context(), "timed"))
	n.later(startTime)
	n.finds("service-stopped", warning, "Service timed was stopped")
	n.finds("kubelet-not-running", failure) // for another reason
}

func TestRegistriesSilent(t *testing.T) {
	t.Parallel()
	dead := errors.New(`Get "http://10.5.0.9:5000/v2/": dial tcp 10.5.0.9:5000: connect: connection refused`)
	n := start(t, config.Init)
	n.images = []*containerd.Registry{{Of: "registry.k8s.io", URL: "http://10.5.0.9:5000/v2/", Mirror: true}, {Of: "registry.k8s.io", URL: "https://registry.k8s.io/v2/", Err: dead}}
	n.healthy()
	n.images[0].Err, n.images[1].Err = dead, nil
	n.finds("registry-silent", warning, "Servers of images don't answer: http://10.5.0.9:5000/v2/.", "takes longer")
	n.images[1].Err = dead
	n.finds("registry-silent", warning, "http://10.5.0.9:5000/v2/, https://registry.k8s.io/v2/", "machine.registries")
	n.images = n.images[1:]
	n.finds("registry-silent", info, "Servers of images don't answer: https://registry.k8s.io/v2/.")

	n = start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.images = []*containerd.Registry{{Of: "registry.k8s.io", URL: "https://registry.k8s.io/v2/", Err: dead}}
		services["etcd"].Prepare = func(context.Context, *dag.Handle) error { return reason.With(containerd.RegistryUnanswered, dead) }
	})
	n.finds("registry-silent", failure, "registry.k8s.io")
	n.finds("image-pull-failing", info, "Follows from registry-silent")

	n = start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.images = []*containerd.Registry{{Of: "registry.k8s.io", URL: "https://registry.k8s.io/v2/", Err: dead}}
		services["etcd"].Prepare = func(context.Context, *dag.Handle) error {
			return reason.With(containerd.ImageNotFound, errors.New("not found"))
		}
	})
	n.finds("image-pull-failing", failure, "no image with this name") // another registry has answered
}

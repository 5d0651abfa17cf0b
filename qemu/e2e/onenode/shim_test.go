//go:build e2e

package onenode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	service = "kubelet"
	// socket and namespace are those of containerd for the services of a node.
	socket    = "/run/containerd/containerd.sock"
	namespace = "system"
	// patience is the first timeout for a frozen shim.
	patience = time.Second
)

// halfRemoved: with a slow disk, the removal of a task exceeds all timeouts, and its
// shim completes it later. containerd then refuses to create a task of this name.
func halfRemoved(t *testing.T, c *e2etest.Cluster) {
	address := c.Nodes[0].Address.String()
	c.Gbctl("-n", address, "service", service, "stop")
	cl := connect(t, c)
	ctx := namespaces.WithNamespace(t.Context(), namespace)
	container := ended(t, ctx, cl)

	shim, wait := shimOf(t, c), eventually.Scale(patience)
	var again time.Time
	c.Eventually(recoverBudget, "the shim removes its task", func() error {
		_, err := container.Task(ctx, nil)
		if errdefs.IsNotFound(err) {
			return nil
		}
		// The shim knows the timeout, stops after the same time when it runs again,
		// and leaves the task unchanged if that isn't enough.
		if time.Now().After(again) {
			askInVain(t, ctx, cl, shim, wait)
			again = time.Now().Add(wait)
			wait *= 2
		}
		return fmt.Errorf("looked up: %w", errors.Join(err, errors.New("it is there")))
	})
	// The twin: this is the state that has to be repaired.
	if _, err := container.NewTask(ctx, cio.NullIO); !errdefs.IsAlreadyExists(err) {
		t.Fatalf("there can be another task: %v", err)
	}

	offset := len(c.Text())
	c.Gbctl("-n", address, "service", service, "start")
	c.Says(recoverBudget, offset, service+": Running (up): Health check successful")
}

// askInVain requests the removal of a task from a frozen shim, and waits for the given time.
func askInVain(t *testing.T, ctx context.Context, cl *client.Client, shim int, wait time.Duration) {
	t.Helper()
	signal(t, shim, syscall.SIGSTOP)
	defer signal(t, shim, syscall.SIGCONT)
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	_, err := cl.TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: service})
	// Either containerd or the connection to it reports it first.
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "deadline") {
		t.Fatalf("a shim that stands still removes its task: %v", err)
	}
}

// connect reaches the node's containerd through the file system of its process.
func connect(t *testing.T, c *e2etest.Cluster) *client.Client {
	t.Helper()
	pids, err := c.Processes("containerd")
	if err != nil || len(pids) != 1 {
		t.Fatalf("there are %d processes containerd, not one: %v, %v", len(pids), pids, err)
	}
	cl, err := client.New("/proc/" + strconv.Itoa(pids[0]) + "/root" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cl.Close() })
	return cl
}

// ended is a container with the service's name whose task has ended.
func ended(t *testing.T, ctx context.Context, cl *client.Client) client.Container {
	t.Helper()
	img, err := cl.GetImage(ctx, config.DefaultKubeletImage)
	if err == nil {
		err = img.Unpack(ctx, "overlayfs") // the node has it in the namespace of pods
	}
	if err != nil {
		t.Fatal(err)
	}
	container, err := cl.NewContainer(ctx, service, client.WithImage(img), client.WithSnapshotter("overlayfs"), client.WithNewSnapshot(service, img),
		client.WithNewSpec(oci.WithProcessArgs("/usr/local/bin/kubelet", "--version")))
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		t.Fatal(err)
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Start(ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case status := <-exited:
		if status.ExitCode() != 0 || status.Error() != nil {
			t.Fatalf("it ended with %d, %v", status.ExitCode(), status.Error())
		}
	case <-time.After(eventually.Scale(recoverBudget)):
		t.Fatal("it doesn't end")
	}
	return container
}

// shimOf is the PID of the service's shim.
func shimOf(t *testing.T, c *e2etest.Cluster) int {
	t.Helper()
	pids, err := c.Processes("containerd-shim-runc-v2")
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		arguments, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if bytes.Contains(arguments, []byte("\x00-id\x00"+service+"\x00")) {
			return pid
		}
	}
	t.Fatalf("none of the shims %v is that of %s", pids, service)
	return 0
}

func signal(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

//go:build e2e && long

// Package docker tests clusters whose nodes are containers of Docker.
package docker

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
)

const (
	// createBudget is for Docker to load the image, and for a control plane and a worker to be ready.
	createBudget = 5 * time.Minute
	askBudget    = time.Minute
	cluster      = "docked"
	worker       = cluster + "-worker-1"
)

// settings of the host that a kubelet writes.
var settings = []string{"vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops"}

func values(t *testing.T) string {
	t.Helper()
	var all string
	for _, name := range settings {
		text, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			t.Fatal(err)
		}
		all += name + "=" + string(text)
	}
	return all
}

// emptyArchive is a file of an image without files.
func emptyArchive(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "empty.tar")
	e2etest.WriteFile(t, path, make([]byte, 1024)) // tar(5): two blocks of zeros
	return path
}

// mirrored is an image that only the registry on this machine has.
const mirrored = "mirrored.test/mine/small:1"

// serveImages returns the port of a registry on Docker's machine, with one image.
func serveImages(t *testing.T, inside *osthread.Thread) (port string) {
	t.Helper()
	dir := t.TempDir()
	all, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	image, err := random.Image(1<<10, 1)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := image.ConfigFile()
	if err == nil {
		settings = settings.DeepCopy()
		settings.OS, settings.Architecture = "linux", runtime.GOARCH
		image, err = mutate.ConfigFile(image, settings)
	}
	if err == nil {
		err = all.AppendImage(image, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": mirrored}))
	}
	if err != nil {
		t.Fatal(err)
	}
	var listener net.Listener
	if err := inside.Do(func() (err error) { listener, err = net.Listen("tcp4", ":0"); return err }); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: registry.New(dir)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	_, port, err = net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// A user of a real Docker makes a cluster, restarts one node and the whole cluster, with the data kept, and removes it:
// then Docker has nothing of it, and the host's settings are those of before. (S-330)
func TestS330Docker(t *testing.T) {
	made := e2etest.Built(t, qemu.Container)
	e2etest.Home(t)
	inside, err := osthread.NewInNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inside.Close() })
	if err := inside.Do(exec.Command("ip", "link", "set", "lo", "up").Run); err != nil {
		t.Fatal(err)
	}
	docker, host := e2etest.DockerIn(t, inside)
	dir, before := t.TempDir(), values(t)
	t.Setenv("DOCKER_HOST", host)
	t.Setenv("KUBECONFIG", filepath.Join(dir, "kubeconfig"))
	t.Setenv(client.EnvConfig, filepath.Join(dir, "garboardconfig"))
	gbctl := func(budget time.Duration, args ...string) string {
		t.Helper()
		out, err := e2etest.GbctlIn(t, inside, budget, args...)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return out
	}
	kubectl := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(made.Kubectl(), args...)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		err := inside.Do(cmd.Start)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out.String())
		}
		return out.String()
	}
	t.Cleanup(func() { _ = qemu.Down(context.Background(), cluster) }) // it is gone if the test passes

	// Somebody else's container isn't touched, even if it has the name of a node.
	if _, err := docker("import", emptyArchive(t), "somebody:1"); err != nil {
		t.Fatal(err)
	}
	if _, err := docker("create", "--name", worker, "somebody:1", "/program"); err != nil {
		t.Fatal(err)
	}
	if out, err := e2etest.GbctlIn(t, inside, createBudget, "cluster", "create", "--provisioner", "docker", "--name", cluster, "--workers", "1"); err == nil || !strings.Contains(err.Error(), "already in use") {
		t.Errorf("a node has the name of somebody else's container: %v\n%s", err, out)
	}
	if out, err := docker("ps", "--all", "--format", "{{.Names}}"); err != nil || out != worker+"\n" {
		t.Errorf("containers after a cluster that couldn't be made: %v\n%s", err, out)
	}
	for _, remove := range [][]string{{"rm", worker}, {"rmi", "somebody:1"}} {
		if _, err := docker(remove...); err != nil {
			t.Fatal(err)
		}
	}

	create := []string{"cluster", "create", "--provisioner", "docker", "--name", cluster, "--workers", "1",
		"--registry-mirror", "mirrored.test=http://10.5.0.1:" + serveImages(t, inside)}
	said := gbctl(createBudget, create...)
	for _, line := range []string{"validating CIDR and reserving IPs", "creating network " + cluster, "creating load balancer", "creating control plane nodes", "creating worker nodes", "waiting for API"} {
		if !strings.Contains(said, line+"\n") {
			t.Errorf("%q isn't in the output:\n%s", line, said)
		}
	}
	if out := kubectl("get", "nodes", "--no-headers"); strings.Count(out, " Ready ") != 2 {
		t.Errorf("nodes:\n%s", out)
	}
	if out, err := docker("ps", "--format", "{{.Names}}"); err != nil || len(strings.Fields(out)) != 3 {
		t.Errorf("containers: %v\n%s", err, out)
	}
	if after := values(t); after != before {
		t.Errorf("the host's settings were %s and are %s", before, after)
	}

	// The nodes use a registry on this machine. (S-134)
	gbctl(createBudget, "-n", worker, "images", "pull", mirrored)
	gbctl(createBudget, "-n", worker, "reboot", "--wait")
	if out := gbctl(askBudget, "cluster", "show", "--name", cluster); !e2etest.Row(out, worker, "running", "1") {
		t.Errorf("after a reboot:\n%s", out)
	}
	kubectl("create", "configmap", "mine", "--from-literal=kept=yes")

	if err := qemu.Stop(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	if out, err := docker("ps", "--all", "--quiet"); err != nil || out != "" {
		t.Errorf("containers of a cluster that is off: %v\n%s", err, out)
	}
	gbctl(createBudget, create...)
	if out := kubectl("get", "configmap", "mine", "-o", "jsonpath={.data.kept}"); out != "yes" {
		t.Errorf("the data is %q", out)
	}

	// Docker's containers go on without the host process. The next command starts the nodes again.
	c, err := qemu.Open(cluster)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := c.HostPID()
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err != nil {
		t.Fatal(err)
	}
	gbctl(createBudget, create...)
	if out := kubectl("get", "configmap", "mine", "-o", "jsonpath={.data.kept}"); out != "yes" {
		t.Errorf("after the end of the host process, the data is %q", out)
	}

	gbctl(askBudget, "cluster", "destroy", "--name", cluster)
	for _, list := range [][]string{{"ps", "--all", "--quiet"}, {"volume", "ls", "--quiet"}, {"images", "--quiet"}, {"network", "ls", "--quiet", "--filter", "type=custom"}} {
		if out, err := docker(list...); err != nil || out != "" {
			t.Errorf("docker %v: %v\n%s", list, err, out)
		}
	}
}

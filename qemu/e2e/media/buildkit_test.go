//go:build e2e && long

package media

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// buildKit builds BuildKit, and starts its daemon, without a network, until the test ends. The function builds a
// Dockerfile with a folder as its context, and pushes the image to a registry on this machine.
func buildKit(t *testing.T, host string) (build func(ref, dockerfile, context string, args ...string) error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "garboard-buildkit-") // short: it has a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	tool := exec.CommandContext(t.Context(), "go", "build", "-mod=readonly", "-o", dir+"/", "github.com/moby/buildkit/cmd/buildkitd", "github.com/moby/buildkit/cmd/buildctl")
	tool.Dir = "buildkit"
	tool.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := tool.CombinedOutput(); err != nil {
		t.Fatalf("build BuildKit: %v: %s", err, out)
	}
	config, address := filepath.Join(dir, "config"), "unix://"+filepath.Join(dir, "socket")
	if err := os.WriteFile(config, fmt.Appendf(nil, "[registry.%q]\nhttp = true\n", host), 0o600); err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command(filepath.Join(dir, "buildkitd"), "--config", config, "--addr", address, "--root", filepath.Join(dir, "data"),
		"--containerd-worker=false", "--oci-worker-net=host", "--oci-worker-snapshotter=native")
	if err := e2etest.Daemon(t, daemon, filepath.Join(dir, "log"), daemon.Start); err != nil {
		t.Fatal(err)
	}
	client := func(args ...string) error {
		out, err := exec.Command(filepath.Join(dir, "buildctl"), append([]string{"--addr", address}, args...)...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("buildctl %v: %w: %s", args, err, out)
		}
		return err
	}
	eventually.That(t, e2etest.DaemonBudget, "buildkitd answers", func() error { return client("debug", "workers") })
	return func(ref, dockerfile, context string, args ...string) error {
		files := t.TempDir()
		if err := os.WriteFile(filepath.Join(files, "Dockerfile"), []byte(dockerfile), 0o600); err != nil {
			return err
		}
		flags := []string{"build", "--progress=plain", "--frontend=dockerfile.v0", "--local=context=" + context, "--local=dockerfile=" + files, "--output=type=image,push=true,name=" + ref}
		for _, arg := range args {
			flags = append(flags, "--opt=build-arg:"+arg)
		}
		return client(flags...)
	}
}

// sameSystem wants the same files below /usr/install in two images.
func sameSystem(t *testing.T, a, b string) {
	t.Helper()
	if one, other := systemFiles(t, a), systemFiles(t, b); len(one) == 0 || !maps.Equal(one, other) {
		t.Errorf("%s has %v, and %s has %v", a, one, b, other)
	}
}

// systemFiles are the files below /usr/install, with their hashes.
func systemFiles(t *testing.T, ref string) map[string]string {
	t.Helper()
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	image, err := remote.Image(parsed)
	if err != nil {
		t.Fatal(err)
	}
	layers := mutate.Extract(image)
	defer layers.Close()
	files := map[string]string{}
	for in := tar.NewReader(layers); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag != tar.TypeReg || !strings.HasPrefix(strings.TrimPrefix(header.Name, "/"), "usr/install/") {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, in); err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(header.Name, "/")] = fmt.Sprintf("%x", sum.Sum(nil))
	}
}

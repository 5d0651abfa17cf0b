//go:build story

package full

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

const (
	fillerImage = "registry.example/garboard/filler:1" // RFC 2606
	// fillBudget is for the filler to have taken everything.
	fillBudget = 20 * time.Second
	// fillerBudget is for its image to be pulled, and for the pod to start.
	fillerBudget = 30 * time.Second
)

// fillerPod takes the room of EPHEMERAL. It is critical: others the kubelet evicts when
// there is none left.
const fillerPod = `
apiVersion: v1
kind: Pod
metadata: {name: filler, namespace: kube-system}
spec:
  hostNetwork: true
  restartPolicy: Never
  priorityClassName: system-node-critical
  containers:
  - name: filler
    image: ` + fillerImage + `
    command: [/filler, /room, "http://ADDRESS/"]
    volumeMounts: [{name: room, mountPath: /room}]
  volumes: [{name: room, emptyDir: {}}]
`

// withFiller has the filler's image among those that nodes can pull.
func withFiller(t *testing.T) story.Option {
	t.Helper()
	return func(o *qemu.Options) {
		dir, err := addFiller(t.TempDir(), o.Images)
		if err != nil {
			t.Fatalf("image of the filler: %v", err)
		}
		o.Images = dir
	}
}

func addFiller(dir, images string) (string, error) {
	program := filepath.Join(dir, "filler")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./filler")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	header := &tar.Header{Name: "filler", Mode: 0o755, Size: int64(len(content))}
	if err := w.WriteHeader(header); err != nil {
		return "", err
	}
	if _, err := w.Write(content); err != nil {
		return "", err
	}
	if err := w.Close(); err != nil {
		return "", err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil {
		return "", err
	}
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: "amd64"})
	if err == nil {
		image, err = mutate.AppendLayers(image, layer)
	}
	if err != nil {
		return "", err
	}
	all, err := linked(images, filepath.Join(dir, "images"))
	if err != nil {
		return "", err
	}
	return string(all), all.AppendImage(image, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": fillerImage}))
}

// linked is a layout with the images of another, whose files it links to.
func linked(from, to string) (layout.Path, error) {
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at, err := filepath.Rel(from, path)
		switch at = filepath.Join(to, at); {
		case err != nil:
			return err
		case d.IsDir():
			return os.Mkdir(at, 0o755)
		case filepath.Dir(path) != from:
			return os.Symlink(path, at)
		}
		data, err := os.ReadFile(path) // the index, which is to change
		if err != nil {
			return err
		}
		return os.WriteFile(at, data, 0o644)
	})
	return layout.Path(to), err
}

// A filler is the pod's other end: it says when to take what there is, and when to end.
// The kubelet and the API server can't, once there is no room for them.
type filler struct {
	c     *story.Cluster
	asks  chan struct{} // it has nothing to do
	fills chan struct{} // it is to fill
	end   chan struct{}
	once  sync.Once
}

func newFiller(t *testing.T, c *story.Cluster) *filler {
	t.Helper()
	f := &filler{c: c, asks: make(chan struct{}), fills: make(chan struct{}), end: make(chan struct{})}
	here := c.Plan.Network.Masked().Addr().Next() // as nodes see this machine
	listener, err := c.Network().Listen(netip.AddrPortFrom(here, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // until it is closed
	t.Cleanup(func() {
		f.release()
		_ = server.Close()
		serving.Wait()
	})
	c.Apply(strings.ReplaceAll(fillerPod, "ADDRESS", listener.Addr().(*net.TCPAddr).String()))
	if !f.asked(fillerBudget) {
		t.Fatalf("the filler hasn't asked for anything: %s", c.Kubectl("describe", "pod", "-n", "kube-system", "filler"))
	}
	return f
}

// ServeHTTP answers as soon as there is something to do.
func (f *filler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case f.asks <- struct{}{}:
	case <-r.Context().Done():
		return
	case <-f.end:
	}
	select {
	case <-f.fills:
	case <-r.Context().Done():
	case <-f.end:
		w.WriteHeader(http.StatusGone)
	}
}

// asked waits until the filler has nothing to do.
func (f *filler) asked(budget time.Duration) bool {
	select {
	case <-f.asks:
		return true
	case <-time.After(eventually.Scale(f.c.Scale(budget))):
		return false
	}
}

// fill takes all the room there is; again, what has become free.
func (f *filler) fill() error {
	select {
	case f.fills <- struct{}{}:
	case <-time.After(eventually.Scale(f.c.Scale(fillBudget))):
		return errors.New("the filler doesn't listen")
	}
	if !f.asked(fillBudget) {
		return errors.New("the filler isn't done")
	}
	return nil
}

// release ends it, and what it took is free.
func (f *filler) release() { f.once.Do(func() { close(f.end) }) }

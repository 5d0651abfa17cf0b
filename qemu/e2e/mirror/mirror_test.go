//go:build e2e

// Package mirror tests a cluster whose images all come from a bundle, which the user serves on
// this machine. The log of the requests proves it.
package mirror

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// S-128, S-129, S-130, S-134: Garboard's own pulls and Kubernetes' use the mirror,
// which is configured by the address of this machine on the nodes' network. The mirror has the
// images that `gbctl images bundle` collects, and the cluster's own registry is empty: the list is complete.
func TestImagesFromAMirror(t *testing.T) {
	made := e2etest.Built(t, qemu.Container)
	source := httptest.NewServer(registry.New(made.Layout))
	defer source.Close()
	bundle, nothing := filepath.Join(t.TempDir(), "images.tar"), t.TempDir()
	e2etest.Gbctl(t, "images", "bundle", "-O", bundle, "--registry-mirror", "*="+source.URL)
	archive, err := registry.OpenArchive(bundle)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}
	images := registry.Serve(archive)
	var mu sync.Mutex // guards asked
	asked := map[string]bool{}
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if path, ok := strings.CutPrefix(r.URL.Path, "/cache"); ok {
			mu.Lock()
			asked[path] = true
			mu.Unlock()
			r.URL.Path = path
			images.ServeHTTP(w, r)
			return
		}
		http.NotFound(w, r)
	}))
	defer mirror.Close()
	at, err := url.Parse(mirror.URL)
	if err != nil {
		t.Fatal(err)
	}
	c, _ := e2etest.Ready(t, "mirror", qemu.Container, func(o *qemu.Options) {
		o.Images = nothing
		o.Mirrors = map[string][]string{"*": {fmt.Sprintf("http://10.5.0.1:%s/cache/", at.Port())}}
	})
	mu.Lock()
	for _, image := range config.DefaultImages() {
		if path := manifestPath(image); !asked[path] {
			t.Errorf("the mirror wasn't asked for %s: %v", path, asked)
		}
	}
	mu.Unlock()
	t.Run("S-133 each registry has its own", func(t *testing.T) { perRegistry(c.In(t), images) })
}

// manifestPath is what is asked for first. The registry's host isn't in it.
func manifestPath(image string) string {
	_, rest, _ := strings.Cut(image, "/")
	repository, tag, _ := strings.Cut(rest, ":")
	return "/v2/" + repository + "/manifests/" + tag
}

// ofRegistry is the same image of another registry.
func ofRegistry(image, host string) string {
	_, rest, _ := strings.Cut(image, "/")
	return host + "/" + rest
}

// registries are those of the guides that have a cache each.
var registries = []string{"docker.io", "registry.k8s.io", "quay.io", "gcr.io", "ghcr.io"}

// mirrorBudget is for a node to use a mirror that it has just got.
const mirrorBudget = 10 * time.Second

// perRegistry gives each of these registries a mirror of its own. It is asked for the images of
// its registry.
func perRegistry(c *e2etest.Cluster, images http.Handler) {
	t, network := c.T(), c.Network()
	for _, host := range registries {
		var asked atomic.Bool
		image := ofRegistry(config.DefaultFlannelImage, host)
		if image == config.DefaultFlannelImage { // the node has it already
			image = ofRegistry(config.DefaultCoreDNSImage, host)
		}
		mirror := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == manifestPath(image) {
				asked.Store(true)
			}
			if ns := r.URL.Query().Get("ns"); ns != host {
				t.Errorf("the mirror of %s is asked for %s of %q", host, r.URL.Path, ns)
			}
			images.ServeHTTP(w, r)
		}))
		listener, err := network.Listen("10.5.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		mirror.Listener.Close()
		mirror.Listener = listener
		mirror.Start()
		t.Cleanup(mirror.Close)
		c.Gbctl("patch", "mc", "--immediate", "-p", fmt.Sprintf("machine: {registries: {mirrors: {%s: {endpoints: [%q]}}}}", host, mirror.URL))
		c.Eventually(mirrorBudget, image+" comes from the mirror of its registry", func() error {
			out, err := c.TryGbctl("images", "pull", "-k", image)
			if err == nil && !asked.Load() {
				err = fmt.Errorf("the mirror wasn't asked: %s", out)
			}
			return err
		})
	}
}

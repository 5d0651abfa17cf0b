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
	"testing"

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
	e2etest.Gbctl(t, "images", "bundle", "-o", bundle, "--registry-mirror", "*="+source.URL)
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
	e2etest.Ready(t, "mirror", qemu.Container, func(o *qemu.Options) {
		o.Images = nothing
		o.Mirrors = map[string][]string{"*": {fmt.Sprintf("http://10.5.0.1:%s/cache/", at.Port())}}
	})
	mu.Lock()
	defer mu.Unlock()
	for _, image := range config.DefaultImages() {
		_, rest, _ := strings.Cut(image, "/") // the registry's host is dropped
		repository, tag, _ := strings.Cut(rest, ":")
		if path := "/v2/" + repository + "/manifests/" + tag; !asked[path] {
			t.Errorf("the mirror wasn't asked for %s: %v", path, asked)
		}
	}
}

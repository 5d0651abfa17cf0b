package qemu

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
)

// Commands that load images at the same time lose none.
func TestImagesAreLoadedAtOnce(t *testing.T) {
	t.Setenv(homeVar, t.TempDir())
	dir, err := dirOf("loaded")
	if err != nil {
		t.Fatal(err)
	}
	var loading sync.WaitGroup
	var want []string
	for i := range 8 {
		image, err := random.Image(1<<10, 2)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := name.NewTag(fmt.Sprintf("example.org/app:v%d", i))
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, ref.Name())
		loading.Go(func() {
			c := Cluster{Plan: Plan{Name: "loaded"}, dir: dir}
			if err := c.Load(t.Context(), ref, image); err != nil {
				t.Error(err)
			}
		})
	}
	loading.Wait()
	p, err := dir.loaded()
	if err != nil {
		t.Fatal(err)
	}
	index, err := p.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range manifest.Manifests {
		got = append(got, m.Annotations[registry.RefAnnotation])
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the cluster has %q", got)
	}
}

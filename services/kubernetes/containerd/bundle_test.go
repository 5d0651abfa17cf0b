package containerd

import (
	"archive/tar"
	"bytes"
	"maps"
	"slices"
	"strings"
	"testing"

	imagestore "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func TestBundled(t *testing.T) {
	t.Parallel()
	archive := func(name, content string) *bytes.Reader {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, f := range [][2]string{{"blobs/sha256/00", "blob"}, {name, content}} {
			if err := w.WriteHeader(&tar.Header{Name: f[0], Size: int64(len(f[1])), Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write([]byte(f[1])); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return bytes.NewReader(b.Bytes())
	}
	const index = `{"manifests": [{"annotations": {"org.opencontainers.image.ref.name": "registry.k8s.io/pause:3.10.1"}}, {"digest": "sha256:00"}]}`
	if names, err := archiveImages(archive("index.json", index)); err != nil || !slices.Equal(slices.Collect(maps.Keys(names)), []string{"registry.k8s.io/pause:3.10.1"}) {
		t.Errorf("%v, %v", names, err)
	}
	for content, in := range map[string]*bytes.Reader{
		"no index":   archive("other.json", index),
		"no JSON":    archive("index.json", "{"),
		"no archive": bytes.NewReader([]byte("text")),
		"nothing":    bytes.NewReader(nil),
	} {
		if names, err := archiveImages(in); err == nil || !strings.HasPrefix(err.Error(), "images.tar: ") {
			t.Errorf("%s: %v, %v", content, names, err)
		}
	}
}

// What containerd has imported must be what was looked at.
func TestOtherImagesOfABundle(t *testing.T) {
	t.Parallel()
	index := map[string]ocispec.Descriptor{"a:1": {Digest: "sha256:aa"}, "b:1": {Digest: "sha256:bb"}}
	imported := []imagestore.Image{
		{Name: "a:1", Target: ocispec.Descriptor{Digest: "sha256:aa"}},
		{Name: "b:1", Target: ocispec.Descriptor{Digest: "sha256:cc"}},
		{Name: "c:1", Target: ocispec.Descriptor{Digest: "sha256:aa"}},
	}
	if got := others(imported, index); !slices.Equal(got, []string{"b:1", "c:1"}) {
		t.Errorf("%q", got)
	}
}

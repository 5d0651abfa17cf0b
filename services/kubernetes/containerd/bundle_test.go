package containerd

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	imagestore "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/opencontainers/go-digest"
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

// An image that containerd has imported must be what was looked at, with all its parts.
func TestImportedImages(t *testing.T) {
	t.Parallel()
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	blob := func(kind, text string, stored bool) ocispec.Descriptor {
		d := ocispec.Descriptor{MediaType: kind, Digest: digest.FromString(text), Size: int64(len(text))}
		if stored {
			if err := content.WriteBlob(t.Context(), store, d.Digest.String(), strings.NewReader(text), d); err != nil {
				t.Fatal(err)
			}
		}
		return d
	}
	image := func(name string, whole bool) ocispec.Descriptor {
		text, err := json.Marshal(ocispec.Manifest{
			MediaType: ocispec.MediaTypeImageManifest,
			Config:    blob(ocispec.MediaTypeImageConfig, fmt.Sprintf(`{"os": "linux", "architecture": %q, "author": %q}`, runtime.GOARCH, name), true),
			Layers:    []ocispec.Descriptor{blob(ocispec.MediaTypeImageLayer, name+" lower", true), blob(ocispec.MediaTypeImageLayer, name+" upper", whole)},
		})
		if err != nil {
			t.Fatal(err)
		}
		return blob(ocispec.MediaTypeImageManifest, string(text), true)
	}
	whole, damaged := image("whole", true), image("damaged", false)
	nothing := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("nothing")}
	index := archive{images: map[string]ocispec.Descriptor{"a:1": whole, "b:1": whole, "d:1": damaged, "e:1": nothing}}
	for _, c := range []struct {
		name   string
		target ocispec.Descriptor
		want   string
	}{
		{"a:1", whole, ""},
		{"b:1", damaged, "isn't the image that its index names"},
		{"c:1", whole, "isn't the image that its index names"},
		{"d:1", damaged, "is damaged: it lacks " + digest.FromString("damaged upper").String()},
		{"e:1", nothing, "is damaged: it lacks " + nothing.Digest.String()},
	} {
		got := ""
		if err := index.check(t.Context(), store, imagestore.Image{Name: c.name, Target: c.target}); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

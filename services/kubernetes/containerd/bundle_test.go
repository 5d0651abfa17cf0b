package containerd

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	imagestore "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.etcd.io/bbolt"
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

// An image of an archive gets the name that was looked at, and no other one; it has all its parts, and replaces none.
func TestImportedImages(t *testing.T) {
	t.Parallel()
	blobs, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	bolt, err := bbolt.Open(filepath.Join(t.TempDir(), "meta.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bolt.Close() })
	db := metadata.NewDB(bolt, blobs, nil)
	ctx := namespaces.WithNamespace(t.Context(), "test")
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	add := func(name, text string) {
		err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(text)), Mode: 0o644})
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	blob := func(kind, text string, there bool) ocispec.Descriptor {
		d := ocispec.Descriptor{MediaType: kind, Digest: digest.FromString(text), Size: int64(len(text))}
		if !there {
			text = "damaged"
		}
		add("blobs/sha256/"+d.Digest.Encoded(), text)
		return d
	}
	text := func(v any) string {
		out, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	image := func(name string, whole bool) ocispec.Descriptor {
		d := blob(ocispec.MediaTypeImageManifest, text(ocispec.Manifest{
			MediaType: ocispec.MediaTypeImageManifest,
			Config:    blob(ocispec.MediaTypeImageConfig, fmt.Sprintf(`{"os": "linux", "architecture": %q, "author": %q}`, runtime.GOARCH, name), true),
			Layers:    []ocispec.Descriptor{blob(ocispec.MediaTypeImageLayer, name+" lower", true), blob(ocispec.MediaTypeImageLayer, name+" upper", whole)},
		}), true)
		d.Annotations = map[string]string{ocispec.AnnotationRefName: name, imagestore.AnnotationImageName: "api-server:1"}
		return d
	}
	there, whole, damaged := image("there:1", true), image("whole:1", true), image("damaged:1", false)
	nothing := ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("nothing"),
		Annotations: map[string]string{ocispec.AnnotationRefName: "nothing:1"},
	}
	add(ocispec.ImageLayoutFile, text(ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion}))
	add(ocispec.ImageIndexFile, text(ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{there, whole, damaged, nothing},
	}))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	in := bytes.NewReader(file.Bytes())
	names, err := archiveImages(in)
	if err != nil {
		t.Fatal(err)
	}
	images := metadata.NewImageStore(db)
	before := map[string]digest.Digest{}
	for _, name := range []string{"api-server:1", "there:1"} {
		before[name] = digest.FromString("before")
		if _, err := images.Create(ctx, imagestore.Image{Name: name, Target: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: before[name], Size: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	err = archive{in, names}.into(ctx, images, db.ContentStore(), Namespace, []string{"damaged:1", "nothing:1", "there:1", "whole:1"})
	want := "images.tar: damaged:1 is damaged: it lacks " + digest.FromString("damaged:1 upper").String() + "\nimages.tar: nothing:1 is damaged: it lacks " + nothing.Digest.String()
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	all, err := images.List(ctx)
	got := map[string]digest.Digest{}
	for _, i := range all {
		got[i.Name] = i.Target.Digest
	}
	before["whole:1"] = whole.Digest
	if err != nil || !maps.Equal(got, before) {
		t.Errorf("%v, %v; want %v", got, err, before)
	}
	// The kubelet knows an image for pods by its full name.
	pods := namespaces.WithNamespace(t.Context(), PodNamespace)
	if err := (archive{in, names}).into(pods, images, db.ContentStore(), PodNamespace, []string{"whole:1"}); err != nil {
		t.Error(err)
	}
	if i, err := images.Get(pods, "docker.io/library/whole:1"); err != nil || i.Target.Digest != whole.Digest {
		t.Errorf("%v, %v", i, err)
	}
	config, err := db.ContentStore().Info(ctx, whole.Digest)
	if err != nil || len(config.Labels) != 3 {
		t.Errorf("the garbage collector knows %v of the image (%v), want the configuration and two layers", config.Labels, err)
	}
}

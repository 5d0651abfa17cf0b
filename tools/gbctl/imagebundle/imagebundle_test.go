package imagebundle

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func newRegistry() http.Handler { return ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))) }

func at(t *testing.T, text, url string) name.Reference {
	t.Helper()
	ref, err := name.ParseReference(text)
	if err != nil {
		t.Fatal(err)
	}
	p, err := mirrored(ref, url)
	if err != nil {
		t.Fatal(err)
	}
	return p.ref
}

// compare compares an image of a registry, with its layers, with the one that it should be.
func compare(t *testing.T, url, text string, want v1.Image) {
	t.Helper()
	got, err := remote.Image(at(t, text, url))
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := want.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if digest, err := got.Digest(); err != nil || digest != wanted {
		t.Errorf("%s: %s, %v, want %s", text, digest, err, wanted)
	}
	layers, err := got.Layers()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		content, err := l.Compressed()
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if _, err := io.Copy(io.Discard, content); err != nil { // it compares the digest
			t.Errorf("%s: %v", text, err)
		}
		content.Close()
	}
}

// Images go from a registry into a file, and from the file to nodes and to another registry. An interrupted command
// continues.
func TestBundle(t *testing.T) {
	t.Parallel()
	names := []string{"registry.k8s.io/pause:3.10.1", "registry.k8s.io/coredns/coredns:v1.14.7"}
	images := map[string]v1.Image{}
	var broken atomic.Pointer[string] // part of the paths that fail
	store := newRegistry()
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if part := broken.Load(); part != nil && strings.Contains(r.URL.Path, *part) {
			http.Error(w, "not now", http.StatusTeapot)
			return
		}
		store.ServeHTTP(w, r)
	}))
	defer upstream.Close()
	for _, text := range names {
		image, err := random.Image(100_000, 2)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(at(t, text, upstream.URL), image); err != nil {
			t.Fatal(err)
		}
		images[text] = image
	}
	file := filepath.Join(t.TempDir(), "images.tar")
	b := Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {upstream.URL}}}

	other := "registry.k8s.io/other:1"
	image, err := random.Image(100_000, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(at(t, other, upstream.URL), image); err != nil {
		t.Fatal(err)
	}
	config, err := images[names[1]].ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	bad := config.String()
	broken.Store(&bad)
	if err := b.Write(t.Context(), append([]string{other}, names...), file); err == nil || !strings.Contains(err.Error(), "coredns") || !strings.Contains(err.Error(), "the same command continues") {
		t.Fatalf("%v", err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("a file with half of the images")
	}
	layers, err := images[names[0]].Layers()
	if err != nil {
		t.Fatal(err)
	}
	pulled, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	if config, err = images[names[0]].ConfigName(); err != nil {
		t.Fatal(err)
	}
	// The power went while these were written.
	broken.Store(nil)
	for _, half := range []string{"blobs/sha256/" + config.Hex, "index.json"} {
		if err := os.Truncate(filepath.Join(file+".partial", half), 10); err != nil {
			t.Fatal(err)
		}
		if err := b.Write(t.Context(), append(names, "registry.k8s.io/missing:1"), file); err == nil || !strings.Contains(err.Error(), "missing") {
			t.Fatalf("an image that isn't there: %v", err)
		}
	}
	bad = pulled.String()
	broken.Store(&bad)
	digest, err := image.Digest()
	if err != nil {
		t.Fatal(err)
	}
	pinned := "registry.k8s.io/other@" + digest.String()
	names, images[pinned] = append(names, pinned), image
	if err := b.Write(t.Context(), names, file); err != nil {
		t.Fatalf("what was pulled is pulled again: %v", err)
	}
	broken.Store(nil)
	if _, err := os.Stat(file + ".partial"); err == nil {
		t.Error("the directory stays")
	}
	first, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Write(t.Context(), names, file); err != nil {
		t.Fatal(err)
	}
	if second, err := os.ReadFile(file); err != nil || string(first) != string(second) {
		t.Error("the same images give another file")
	}

	archive, err := registry.OpenArchive(file)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	index, err := indexOf(archive)
	if err != nil || slices.ContainsFunc(index.Manifests, func(d v1.Descriptor) bool { return d.Annotations[registry.RefAnnotation] == other }) {
		t.Errorf("an image of an earlier command is in the file: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Serve(ctx, l, registry.Serve(archive)) }()
	for _, text := range names {
		compare(t, "http://"+l.Addr().String(), text, images[text])
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}

	target := httptest.NewServer(newRegistry())
	defer target.Close()
	if err := (Bundle{Say: func(string) {}}).Push(t.Context(), archive, strings.TrimPrefix(target.URL, "http://"), true); err != nil {
		t.Fatal(err)
	}
	for _, text := range names {
		compare(t, target.URL, text, images[text])
	}
	if err := (Bundle{Say: func(string) {}}).Push(t.Context(), archive, strings.TrimPrefix(target.URL, "http://")+"/site", true); err != nil {
		t.Fatal(err)
	}
	for _, text := range names {
		compare(t, target.URL+"/v2/site", text, images[text])
	}
	behindProxy(t, target.URL, images[names[1]])
}

// behindProxy pulls an image from a registry whose API isn't at /v2, as nodes do.
func behindProxy(t *testing.T, of string, want v1.Image) {
	t.Helper()
	const text = "docker.io/coredns/coredns:v1.14.7"
	to, err := url.Parse(of)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewServer(http.StripPrefix("/api/hub", httputil.NewSingleHostReverseProxy(to)))
	defer front.Close()
	got, _, err := Bundle{Mirrors: map[string][]string{"docker.io": {front.URL + "/api/hub/"}}}.find(t.Context(), text)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := got.Layers()
	if err != nil {
		t.Fatal(err)
	}
	content, err := layers[0].Compressed()
	if err == nil {
		_, err = io.Copy(io.Discard, content)
	}
	gotten, digestErr := got.Digest()
	wanted, wantErr := want.Digest()
	if err := errors.Join(err, digestErr, wantErr); err != nil || gotten != wanted {
		t.Errorf("%s: %s, want %s (%v)", text, gotten, wanted, err)
	}
}

// A node asks for the digest that the image is named with.
func TestPinnedImageOfSeveralPlatforms(t *testing.T) {
	t.Parallel()
	upstream := httptest.NewServer(newRegistry())
	defer upstream.Close()
	image, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	if err := remote.WriteIndex(at(t, "registry.k8s.io/pause:1", upstream.URL), index); err != nil {
		t.Fatal(err)
	}
	of, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	one, err := image.Digest()
	if err != nil {
		t.Fatal(err)
	}
	b := Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {upstream.URL}}}
	err = b.Write(t.Context(), []string{"registry.k8s.io/pause@" + of.String()}, filepath.Join(t.TempDir(), "images.tar"))
	if err == nil || !strings.Contains(err.Error(), "name that of linux/amd64, registry.k8s.io/pause@"+one.String()) {
		t.Error(err)
	}
}

// signatureOf is a signature of cosign that refers to an image.
func signatureOf(t *testing.T, of v1.Image) v1.Image {
	t.Helper()
	digest, err := of.Digest()
	if err != nil {
		t.Fatal(err)
	}
	size, err := of.Size()
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), static.NewLayer([]byte("{}"), bundleType+".v0.3+json"))
	if err != nil {
		t.Fatal(err)
	}
	signature, ok := mutate.Subject(image, v1.Descriptor{MediaType: types.OCIManifestSchema1, Digest: digest, Size: size}).(v1.Image)
	if !ok {
		t.Fatal("no image")
	}
	return signature
}

// Signatures that refer to an image go with it, from and to registries that list what refers to an image, and those
// that don't.
func TestBundleHasSignatures(t *testing.T) {
	t.Parallel()
	const text = "registry.example/image:1"
	for _, lists := range []bool{true, false} {
		serve := func() *httptest.Server {
			return httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)), ggcr.WithReferrersSupport(lists)))
		}
		upstream, target := serve(), serve()
		defer upstream.Close()
		defer target.Close()
		image, err := random.Image(100_000, 1)
		if err != nil {
			t.Fatal(err)
		}
		image = mutate.MediaType(image, types.OCIManifestSchema1)
		signature := signatureOf(t, image)
		of, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digest, err := signature.Digest()
		if err != nil {
			t.Fatal(err)
		}
		for ref, i := range map[string]v1.Image{text: image, "registry.example/image@" + digest.String(): signature} {
			if err := remote.Write(at(t, ref, upstream.URL), i); err != nil {
				t.Fatal(err)
			}
		}
		file := filepath.Join(t.TempDir(), "images.tar")
		if err := (Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {upstream.URL}}}).Write(t.Context(), []string{text}, file); err != nil {
			t.Fatal(err)
		}
		archive, err := registry.OpenArchive(file)
		if err != nil {
			t.Fatal(err)
		}
		defer archive.Close()
		if err := (Bundle{Say: func(string) {}}).Push(t.Context(), archive, strings.TrimPrefix(target.URL, "http://"), true); err != nil {
			t.Fatal(err)
		}
		fromFile := httptest.NewServer(registry.Serve(archive))
		defer fromFile.Close()
		for _, place := range []*httptest.Server{fromFile, target} {
			found, err := remote.Referrers(at(t, text, place.URL).Context().Digest(of.String()))
			if err != nil {
				t.Fatal(err)
			}
			m, err := found.IndexManifest()
			if err != nil || len(m.Manifests) != 1 || m.Manifests[0].Digest != digest {
				t.Fatalf("lists %v: %+v, %v, want %s", lists, m, err, digest)
			}
			compare(t, place.URL, "registry.example/image@"+digest.String(), signature)
		}
	}
}

func TestWhatIsNoBundle(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "images.tar")
	for _, content := range []string{"", "no archive"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := registry.OpenArchive(file); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%q: %v", content, err)
		}
	}
}

// The host of a registry is replaced, and the path stays, as nodes do it (S-126).
func TestMirrored(t *testing.T) {
	t.Parallel()
	for _, tc := range [][3]string{
		{"registry.k8s.io/coredns/coredns:v1", "http://10.5.0.1:5000", "10.5.0.1:5000/coredns/coredns:v1"},
		{"nginx", "https://cache.example/hub/", "cache.example/library/nginx:latest"},
		{"nginx", "https://cache.example/v2/hub/", "cache.example/hub/library/nginx:latest"},
		{"nginx", "https://cache.example/v2", "cache.example/library/nginx:latest"},
		{"a.example/b@sha256:" + strings.Repeat("0", 64), "http://10.5.0.1:5000/", "10.5.0.1:5000/b@sha256:" + strings.Repeat("0", 64)},
	} {
		if got := at(t, tc[0], tc[1]).Name(); got != tc[2] {
			t.Errorf("%s at %s: %s, want %s", tc[0], tc[1], got, tc[2])
		}
	}
	if _, err := mirrored(at(t, "a.example/b:1", "http://c.example"), "c.example"); err == nil {
		t.Error("a mirror that is no URL")
	}
}

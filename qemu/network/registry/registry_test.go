package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// lay writes a layout with one random image per reference.
func lay(t *testing.T, dir string, references ...string) map[string]v1.Image {
	t.Helper()
	path, err := layout.FromPath(dir)
	if err != nil {
		path, err = layout.Write(dir, empty.Index)
	}
	if err != nil {
		t.Fatal(err)
	}
	images := map[string]v1.Image{}
	for _, ref := range references {
		image, err := random.Image(1<<12, 2)
		if err != nil {
			t.Fatal(err)
		}
		if err := path.AppendImage(image, layout.WithAnnotations(map[string]string{RefAnnotation: ref})); err != nil {
			t.Fatal(err)
		}
		images[ref] = image
	}
	return images
}

func serve(t *testing.T, dir string) (host string) {
	t.Helper()
	server := httptest.NewServer(New(dir))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// S-126, S-127: the path of a reference is requested without changes, whatever the
// registry's host. The client is the same as on nodes, with the registry as its only mirror.
func TestS126PathIsKeptAndHostDropped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	images := lay(t, dir,
		"registry.k8s.io/pause:3.10.1",
		"registry.k8s.io/coredns/coredns:v1.14.7",
		"docker.io/library/busybox:1",
		"ghcr.io/garboard-os/kubelet:v1.37.2")
	host := serve(t, dir)
	client := docker.NewResolver(docker.ResolverOptions{Hosts: func(string) ([]docker.RegistryHost, error) {
		return []docker.RegistryHost{{
			Host: host, Scheme: "http", Path: "/v2", Client: http.DefaultClient,
			Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
		}}, nil
	}})
	for ref, image := range images {
		want, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		repository, _, _ := strings.Cut(ref, ":")
		for _, by := range []string{ref, repository + "@" + want.String()} {
			if err := pull(t.Context(), client, by, image); err != nil {
				t.Errorf("pull %s: %v", by, err)
			}
		}
	}
}

// pull fetches a manifest and all that it names, as a node does.
func pull(ctx context.Context, client remotes.Resolver, ref string, want v1.Image) error {
	name, desc, err := client.Resolve(ctx, ref)
	if err != nil {
		return err
	}
	fetcher, err := client.Fetcher(ctx, name)
	if err != nil {
		return err
	}
	got, err := fetch(ctx, fetcher, desc)
	if err != nil {
		return err
	}
	manifest, err := want.RawManifest()
	if err != nil {
		return err
	}
	if !bytes.Equal(got, manifest) {
		return fmt.Errorf("another manifest: %s", got)
	}
	var m ocispec.Manifest
	if err := json.Unmarshal(got, &m); err != nil {
		return err
	}
	for _, part := range append(m.Layers, m.Config) {
		data, err := fetch(ctx, fetcher, part)
		if err != nil {
			return err
		}
		if digest.FromBytes(data) != part.Digest {
			return fmt.Errorf("%s came with other content", part.Digest)
		}
	}
	return nil
}

func fetch(ctx context.Context, fetcher remotes.Fetcher, desc ocispec.Descriptor) ([]byte, error) {
	r, err := fetcher.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestTagsAreListed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lay(t, dir, "registry.k8s.io/pause:3.9", "registry.k8s.io/pause:3.10")
	got := get(t, serve(t, dir), "GET", "/v2/pause/tags/list", http.StatusOK)
	if want := `{"name":"pause","tags":["3.10","3.9"]}` + "\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Images that are built while a cluster runs can be pulled.
func TestChangedLayoutIsSeen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lay(t, dir, "r.example/a:1")
	host := serve(t, dir)
	get(t, host, "GET", "/v2/b/manifests/1", http.StatusNotFound)
	lay(t, dir, "r.example/b:1")
	get(t, host, "GET", "/v2/b/manifests/1", http.StatusOK)
}

func TestBlobRanges(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	images := lay(t, dir, "r.example/a:1")
	layers, err := images["r.example/a:1"].Layers()
	if err != nil {
		t.Fatal(err)
	}
	hash, _ := layers[0].Digest()
	req, _ := http.NewRequest("GET", fmt.Sprintf("http://%s/v2/a/blobs/%s?ns=r.example", serve(t, dir), hash), nil)
	req.Header.Set("Range", "bytes=10-19")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, _ := io.ReadAll(resp.Body)
	whole, err := os.ReadFile(filepath.Join(dir, "blobs/sha256", hash.Hex))
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusPartialContent || string(got) != string(whole[10:20]) {
		t.Errorf("range: %s, %d bytes", resp.Status, len(got))
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	images := lay(t, dir, "r.example/a:1")
	layers, _ := images["r.example/a:1"].Layers()
	layer, _ := layers[0].Digest()
	host := serve(t, dir)
	secret := filepath.Join(filepath.Dir(dir), "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/v2/", http.StatusOK},
		{"GET", "/", http.StatusNotFound},
		{"GET", "/v2/a/manifests/2", http.StatusNotFound},
		{"GET", "/v2/nobody/tags/list", http.StatusNotFound},
		{"GET", "/v2/a/manifests/" + layer.String(), http.StatusNotFound}, // a layer is no manifest
		{"GET", "/v2/a/blobs/sha256:" + strings.Repeat("0", 64), http.StatusNotFound},
		{"GET", "/v2/a/blobs/sha256:..%2f..%2f..%2fsecret", http.StatusNotFound},
		{"GET", "/v2/a/blobs/secret", http.StatusBadRequest},
		{"PUT", "/v2/a/manifests/1", http.StatusMethodNotAllowed},
		{"POST", "/v2/a/blobs/uploads/", http.StatusMethodNotAllowed},
	} {
		get(t, host, tc.method, tc.path, tc.want)
	}
}

// A manifest needn't say what it is, and a blob isn't one.
func TestManifestWithoutMediaType(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for text, want := range map[string]struct {
		status int
		media  string
	}{
		`{"schemaVersion": 2, "config": {}, "layers": []}`: {http.StatusOK, "application/vnd.oci.image.manifest.v1+json"},
		`{"schemaVersion": 2, "manifests": []}`:            {http.StatusOK, "application/vnd.oci.image.index.v1+json"},
		`{"os": "linux"}`:                                  {http.StatusNotFound, "application/json"},
	} {
		of := digest.FromString(text)
		blob := filepath.Join(dir, "blobs", "sha256", of.Encoded())
		if err := errors.Join(os.MkdirAll(filepath.Dir(blob), 0o755), os.WriteFile(blob, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		resp, err := http.Get("http://" + serve(t, dir) + "/v2/a/manifests/" + of.String())
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := resp.Header.Get("Content-Type"); resp.StatusCode != want.status || got != want.media {
			t.Errorf("%s: %s, %s", text, resp.Status, got)
		}
	}
}

// A broken or missing layout is an error in the answer, and nothing panics.
func TestBrokenLayout(t *testing.T) {
	t.Parallel()
	for name, index := range map[string]string{"truncated": `{"manifests":[`, "bad reference": `{"manifests":[{"annotations":{"` + RefAnnotation + `":"A B"}}]}`} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "index.json"), []byte(index), 0o644); err != nil {
			t.Fatal(err)
		}
		if body := get(t, serve(t, dir), "GET", "/v2/a/manifests/1", http.StatusNotFound); !strings.Contains(body, "index.json") {
			t.Errorf("%s: %s", name, body)
		}
	}
	get(t, serve(t, t.TempDir()), "GET", "/v2/a/manifests/1", http.StatusNotFound)
}

// Clients of a registry ask without the host of an image's name.
func TestImagesThatOnlyTheirHostsTellApart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lay(t, dir, "a.example/nginx:1", "a.example/nginx:2", "b.example/nginx:3")
	if err := Check(os.DirFS(dir)); err != nil {
		t.Error(err)
	}
	lay(t, dir, "b.example/nginx:1")
	for _, err := range []string{fmt.Sprint(Check(os.DirFS(dir))), get(t, serve(t, dir), "GET", "/v2/nginx/manifests/1", http.StatusNotFound)} {
		if !strings.Contains(err, "there are two: a.example/nginx:1 and b.example/nginx:1") {
			t.Error(err)
		}
	}
}

func get(t *testing.T, host, method, path string, want int) string {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+host+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != want {
		t.Errorf("%s %s: %s, want %d: %s", method, path, resp.Status, want, body)
	}
	return string(body)
}

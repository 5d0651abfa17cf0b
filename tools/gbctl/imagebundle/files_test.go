package imagebundle

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// imageOf is an image with files.
func imageOf(t *testing.T, files map[string]string) v1.Image {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o750, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// packed is a file in the OCI image layout, as of 'gbctl media build installer'.
func packed(t *testing.T, images map[string]v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	file, in := filepath.Join(dir, "installer.tar"), filepath.Join(dir, "layout")
	to, err := layout.Write(in, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for ref, image := range images {
		if err := to.AppendImage(image, layout.WithAnnotations(map[string]string{registry.RefAnnotation: ref})); err != nil {
			t.Fatal(err)
		}
	}
	if err := oci.Pack(in, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// damagedSave is an archive as 'docker save' writes it, with another byte in a file.
func damagedSave(t *testing.T, image v1.Image) string {
	t.Helper()
	config, err := image.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	in, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for name, content := range map[string][]byte{
		"manifest.json": []byte(`[{"Config": "config.json", "RepoTags": ["registry.example/installer:1"], "Layers": ["layer.tar"]}]`),
		"config.json":   config, "layer.tar": bytes.Replace(layer, []byte("boot"), []byte("bout"), 1),
	} {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "damaged.tar")
	if err := errors.Join(w.Close(), os.WriteFile(file, out.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	return file
}

// damagedLayer is an archive of the OCI image layout, whose layer has another checksum at its end.
func damagedLayer(t *testing.T, image v1.Image) string {
	t.Helper()
	file := packed(t, map[string]v1.Image{"registry.example/installer:1": image})
	all, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	in, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(in)
	at := bytes.Index(all, layer)
	if err != nil || at < 0 {
		t.Fatalf("the layer is at %d, %v", at, err)
	}
	all[at+len(layer)-8]++ // RFC 1952, 2.2: CRC32, and the size
	if err := os.WriteFile(file, all, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The files come from an archive of an installer, or from one of 'docker save', and only those of the folder.
func TestFilesOfAnArchive(t *testing.T) {
	t.Parallel()
	installer := imageOf(t, map[string]string{"usr/install/garboard.json": "{}", "usr/install/loader/grub": "boot", "etc/motd": "hello"})
	saved := filepath.Join(t.TempDir(), "saved.tar")
	tag, err := name.NewTag("registry.example/installer:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(saved, tag, installer); err != nil {
		t.Fatal(err)
	}
	other := imageOf(t, map[string]string{"usr/bin/nginx": "web"})
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no archive"), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct{ from, want string }{
		"installer":   {packed(t, map[string]v1.Image{"registry.example/installer:1": installer}), ""},
		"docker save": {saved, ""},
		"another":     {packed(t, map[string]v1.Image{"registry.example/nginx:1": other}), "it has no /usr/install: it is no installer image"},
		"several":     {packed(t, map[string]v1.Image{"registry.example/a:1": installer, "registry.example/b:1": installer}), "has several images"},
		"no name":     {packed(t, map[string]v1.Image{"": installer}), "has no image with a name"},
		"no archive":  {text, "is no archive of container images"},
		"damaged":     {damagedSave(t, installer), "is damaged"},
		"bad layer":   {damagedLayer(t, installer), "checksum"},
	} {
		dir := filepath.Join(t.TempDir(), "files")
		err := (Bundle{Say: func(string) {}}).Files(t.Context(), c.from, "usr/install", dir)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", what, err, c.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		var found []string
		if err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				found = append(found, strings.TrimPrefix(path, dir))
			}
			return err
		}); err != nil || !slices.Equal(found, []string{"/garboard.json", "/loader/grub"}) {
			t.Errorf("%s: %q, %v", what, found, err)
		}
		if info, err := os.Stat(filepath.Join(dir, "loader/grub")); err != nil || info.Mode() != 0o750 {
			t.Errorf("%s: %v, %v", what, info, err)
		}
	}
}

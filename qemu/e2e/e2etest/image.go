//go:build e2e

package e2etest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// WithImage adds an image to those that nodes can pull. It contains only the
// program of a folder beside the test, as /FOLDER.
func WithImage(t *testing.T, name, folder string) Option {
	t.Helper()
	return func(o *qemu.Options) {
		dir, err := addImage(t.TempDir(), o.Images, name, folder)
		if err != nil {
			t.Fatalf("image of %s: %v", folder, err)
		}
		o.Images = dir
	}
}

func addImage(dir, images, name, folder string) (string, error) {
	program := filepath.Join(dir, folder)
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./"+folder)
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
	header := &tar.Header{Name: folder, Mode: 0o755, Size: int64(len(content))}
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
	return string(all), all.AppendImage(image, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name}))
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
		data, err := os.ReadFile(path) // the index, which will change
		if err != nil {
			return err
		}
		return os.WriteFile(at, data, 0o644)
	})
	return layout.Path(to), err
}

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

	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/u-root/u-root/pkg/cpio"
)

// refName is the annotation with the name of an image in a layout
// (https://github.com/opencontainers/image-spec/blob/main/annotations.md).
const refName = "org.opencontainers.image.ref.name"

// WithImage adds an image to those that nodes can pull. It contains only the
// program of a folder beside the test, as /FOLDER.
func WithImage(t testing.TB, name, folder string) Option { return WithProgram(t, name, folder, folder) }

// WithProgram is WithImage with another path of the program.
func WithProgram(t testing.TB, name, folder, path string) Option {
	t.Helper()
	return func(o *qemu.Options) {
		dir, err := addImage(t.TempDir(), o.Images, name, folder, path)
		if err != nil {
			t.Fatalf("image of %s: %v", folder, err)
		}
		o.Images = dir
	}
}

// WithName gives an image that nodes can pull another name, too.
func WithName(t testing.TB, name, of string) Option {
	t.Helper()
	return func(o *qemu.Options) {
		all, err := linked(o.Images, filepath.Join(t.TempDir(), "images"))
		if err == nil {
			err = addName(all, name, of)
		}
		if err != nil {
			t.Fatalf("image %s: %v", of, err)
		}
		o.Images = string(all)
	}
}

func addName(all layout.Path, name, of string) error {
	index, err := all.ImageIndex()
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		if d.Annotations[refName] == of {
			d.Annotations = map[string]string{refName: name}
			return all.AppendDescriptor(d)
		}
	}
	return errors.New("there is none")
}

// WithInit makes a system start a program of a folder beside the test, as /FOLDER in its initramfs, in place of its
// own.
func WithInit(t testing.TB, o media.Options, folder string) media.Options {
	t.Helper()
	dir := t.TempDir()
	content, err := program(dir, folder)
	if err != nil {
		t.Fatalf("%s: %v", folder, err)
	}
	all, err := os.ReadFile(Parts(t).Initramfs)
	if err != nil {
		t.Fatal(err)
	}
	// The kernel unpacks one archive after the other.
	archive := bytes.NewBuffer(all)
	records := []cpio.Record{cpio.StaticFile(folder, string(content), 0o755)}
	cpio.MakeAllReproducible(records)
	w := cpio.Newc.Writer(archive)
	if err := errors.Join(cpio.WriteRecords(w, records), cpio.WriteTrailer(w)); err != nil {
		t.Fatal(err)
	}
	o.Initramfs = filepath.Join(dir, "initramfs")
	if err := os.WriteFile(o.Initramfs, archive.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	o.Args = append([]string{"rdinit=/" + folder}, o.Args...)
	return o
}

// WithHalfAKernel makes a system whose kernel is cut off.
func WithHalfAKernel(t testing.TB, o media.Options) media.Options {
	t.Helper()
	kernel, err := os.ReadFile(Parts(t).Kernel)
	o.Kernel = filepath.Join(t.TempDir(), "vmlinuz")
	if err == nil {
		err = os.WriteFile(o.Kernel, kernel[:len(kernel)/2], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// Without makes a system whose root filesystem lacks a file.
func Without(t testing.TB, o media.Options, path string) media.Options {
	t.Helper()
	dir, work := t.TempDir(), t.TempDir()
	err := Parts(t).With(o).Directory(dir)
	if err == nil {
		err = customize.Change{Remove: []string{path}}.Apply(t.Context(), dir, func(line string) { t.Log(line) })
	}
	var installer media.Installer
	if err == nil {
		installer, err = media.ReadInstaller(dir)
	}
	var made media.Options
	if err == nil {
		made, err = installer.Options(dir, work)
	}
	if err != nil {
		t.Fatal(err)
	}
	o.Initramfs = made.Initramfs
	return o
}

// program builds a program of a folder beside the test.
func program(dir, folder string) ([]byte, error) {
	path := filepath.Join(dir, folder)
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "./"+folder)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, errors.Join(err, errors.New(string(out)))
	}
	return os.ReadFile(path)
}

func addImage(dir, images, name, folder, path string) (string, error) {
	content, err := program(dir, folder)
	if err != nil {
		return "", err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	header := &tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}
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
	return string(all), all.AppendImage(image, layout.WithAnnotations(map[string]string{refName: name}))
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

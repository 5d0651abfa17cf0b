package imagebundle

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// maxFiles bounds the files that are taken out of an image.
const maxFiles = 2 << 30

// Files writes the files that an image has in a folder to a new directory.
func (b Bundle) Files(ctx context.Context, from, folder, dir string) error {
	return b.Image(ctx, from, func(_ string, image v1.Image) error {
		found, err := writeFiles(image, folder, dir)
		if err == nil && !found {
			err = fmt.Errorf("it has no /%s: it is no installer image of Garboard", folder)
		}
		if err != nil {
			return fmt.Errorf("image %s: %w", from, err)
		}
		return nil
	})
}

// Image calls use with an image and its name. The image is one of a registry or, if there is a file with that name, the
// only one in it: an archive of the OCI image layout, or one of 'docker save', where a name may be missing.
func (b Bundle) Image(ctx context.Context, from string, use func(ref string, image v1.Image) error) error {
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		b.Say("pulling " + from)
		image, _, err := b.find(ctx, from)
		if err != nil {
			return err
		}
		return use(from, image)
	}
	b.Say("reading " + from)
	if image, err := tarball.ImageFromPath(from, nil); err == nil {
		if err := validate.Image(image); err != nil {
			return fmt.Errorf("%s is damaged: %w", from, err)
		}
		listed, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(from) })
		if err != nil {
			return err
		}
		return use(strings.Join(listed[0].RepoTags[:min(1, len(listed[0].RepoTags))], ""), image)
	}
	archive, err := registry.OpenArchive(from)
	if err != nil {
		return err
	}
	defer archive.Close()
	found := 0
	err = each(ctx, archive, false, func(ref name.Reference, _ string, image v1.Image) error {
		if found++; found > 1 {
			return fmt.Errorf("%s has several images: serve it ('gbctl images serve'), and name one", from)
		}
		return use(ref.Name(), image)
	})
	if err == nil && found == 0 {
		err = fmt.Errorf("%s has no image with a name", from)
	}
	return err
}

// Missing are those of some images that an archive doesn't have. A node finds an image by its whole name, as it is in
// the configuration.
func Missing(archive *registry.Archive, images []string) ([]string, error) {
	index, err := indexOf(archive)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(images), func(image string) bool {
		return slices.ContainsFunc(index.Manifests, func(d v1.Descriptor) bool { return d.Annotations[registry.RefAnnotation] == image })
	}), nil
}

func indexOf(archive *registry.Archive) (*v1.IndexManifest, error) {
	file, err := archive.Open("index.json")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return v1.ParseIndexManifest(file)
}

func writeFiles(image v1.Image, folder, dir string) (found bool, err error) {
	layers := mutate.Extract(image)
	defer layers.Close()
	left := int64(maxFiles)
	for in := tar.NewReader(layers); ; {
		header, err := in.Next()
		// also where a layer ends early, or has another checksum: what follows has the error
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, layers)
			return found, err
		}
		if err != nil {
			return found, err
		}
		inside, ok := strings.CutPrefix(path.Clean("/"+header.Name), "/"+folder+"/")
		if !ok || header.Typeflag != tar.TypeReg {
			continue
		}
		if left -= header.Size; left < 0 || !filepath.IsLocal(inside) {
			return found, fmt.Errorf("/%s has more than %d bytes, or a file outside of it", folder, maxFiles)
		}
		to := filepath.Join(dir, inside)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return found, err
		}
		if err := writeFile(to, in, header.FileInfo().Mode().Perm()); err != nil {
			return found, err
		}
		found = true
	}
}

func writeFile(to string, content io.Reader, mode fs.FileMode) (err error) {
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, content)
	return err
}

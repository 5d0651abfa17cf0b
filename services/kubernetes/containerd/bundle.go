package containerd

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	client "github.com/containerd/containerd/v2/client"
	imagestore "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/system/machine"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// importTimeout is for 1 GB from a medium with 1 MB/s.
const importTimeout = 20 * time.Minute

// importBundle takes the images that a medium in the machine has (gbctl media build --images), unless they are there. What it has replaces
// nothing: an image that was pulled stays. Whatever is wrong with it, the node can still pull.
func (c *Containerd) importBundle(ctx context.Context, h *dag.Handle) {
	if c.Volume == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, importTimeout)
	defer cancel()
	for _, label := range []string{boot.MediumLabel, boot.ISOLabel} {
		err := c.Volume(ctx, label, func(files fs.FS) error {
			file, err := files.Open(boot.BundleFile)
			if errors.Is(err, fs.ErrNotExist) {
				return boot.ErrNone
			}
			if err != nil {
				return err
			}
			defer file.Close()
			archive, ok := file.(io.ReadSeeker)
			if !ok {
				return fmt.Errorf("%s can't be read twice", boot.BundleFile)
			}
			return c.importFrom(ctx, h, archive)
		})
		if err != nil && !errors.Is(err, boot.ErrNone) {
			h.Log.Error("the images of the medium aren't used", "medium", label, "err", err)
		}
	}
}

func (c *Containerd) importFrom(ctx context.Context, h *dag.Handle, archive io.ReadSeeker) error {
	images, err := archiveImages(archive)
	if err != nil {
		return err
	}
	cfg, err := machine.Config(c.Store)
	if err != nil {
		return err
	}
	cl, err := c.Client()
	if err != nil {
		return err
	}
	own := map[string]bool{cfg.Cluster.Etcd.Image: true, cfg.Machine.Kubelet.Image: true}
	for _, namespace := range []string{Namespace, PodNamespace} {
		ctx := namespaces.WithNamespace(ctx, namespace)
		missing := map[string]bool{}
		for name := range images {
			if own[name] != (namespace == Namespace) || signatureTag.MatchString(name) {
				continue
			}
			if _, err := cl.ImageService().Get(ctx, name); err == nil {
				continue
			}
			if err := acceptBundled(ctx, archive, images, name, cfg.Machine.Images); err != nil {
				h.Log.Error("an image of the medium isn't used", "image", name, "err", err)
				continue
			}
			missing[name] = true
		}
		if len(missing) == 0 {
			continue
		}
		h.Event(fmt.Sprintf("importing %d images of the medium for %s", len(missing), namespace))
		if _, err := archive.Seek(0, io.SeekStart); err != nil {
			return err
		}
		imported, err := cl.Import(ctx, archive, client.WithImageRefTranslator(func(name string) string {
			if missing[name] {
				return name
			}
			return "" // it isn't made an image, and its content is collected
		}))
		// An archive may say one thing to us and another one to containerd, such as with a second index.
		for _, name := range others(imported, images) {
			err = errors.Join(err, fmt.Errorf("%s: %s isn't the image that its index names", boot.BundleFile, name), ignoreGone(cl.ImageService().Delete(ctx, name)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// others are the names of images that aren't those that were looked at.
func others(imported []imagestore.Image, images map[string]ocispec.Descriptor) (names []string) {
	for _, i := range imported {
		if images[i.Name].Digest != i.Target.Digest {
			names = append(names, i.Name)
		}
	}
	return names
}

// acceptBundled verifies an image of an archive, if there is a rule for it. Its signatures are in the archive, too.
func acceptBundled(ctx context.Context, file io.ReadSeeker, images map[string]ocispec.Descriptor, image string, rules config.Images) error {
	rule := rules.Rule(image)
	if rule == nil {
		return nil
	}
	return verify(ctx, image, images[image].Digest, rule, archive{file, images})
}

// archiveFile finds a file in an archive.
func archiveFile(archive io.ReadSeeker, name string) (io.Reader, error) {
	if _, err := archive.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	for files := tar.NewReader(archive); ; {
		header, err := files.Next()
		if err != nil {
			return nil, fmt.Errorf("%s: no %s: %w", boot.BundleFile, name, err)
		}
		if header.Name == name {
			return files, nil
		}
	}
}

// archiveImages are the images in an archive of the OCI image layout, by name.
func archiveImages(archive io.ReadSeeker) (map[string]ocispec.Descriptor, error) {
	file, err := archiveFile(archive, ocispec.ImageIndexFile)
	if err != nil {
		return nil, err
	}
	var index ocispec.Index
	if err := json.NewDecoder(file).Decode(&index); err != nil {
		return nil, fmt.Errorf("%s: %w", boot.BundleFile, err)
	}
	images := map[string]ocispec.Descriptor{}
	for _, m := range index.Manifests {
		if name := m.Annotations[ocispec.AnnotationRefName]; name != "" {
			images[name] = m
		}
	}
	return images, nil
}

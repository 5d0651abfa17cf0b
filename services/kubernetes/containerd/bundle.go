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
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/garboard-os/garboard/boot"
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
	names, err := bundled(archive)
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
		for _, name := range names {
			if own[name] != (namespace == Namespace) {
				continue
			}
			if _, err := cl.ImageService().Get(ctx, name); err != nil {
				missing[name] = true
			}
		}
		if len(missing) == 0 {
			continue
		}
		h.Event(fmt.Sprintf("importing %d images of the medium for %s", len(missing), namespace))
		if _, err := archive.Seek(0, io.SeekStart); err != nil {
			return err
		}
		_, err := cl.Import(ctx, archive, client.WithImageRefTranslator(func(name string) string {
			if missing[name] {
				return name
			}
			return "" // it isn't made an image, and its content is collected
		}))
		if err != nil {
			return err
		}
	}
	return nil
}

// bundled are the names of the images in an archive of the OCI image layout.
func bundled(archive io.Reader) (names []string, err error) {
	for files := tar.NewReader(archive); ; {
		header, err := files.Next()
		if err != nil {
			return nil, fmt.Errorf("%s: no index: %w", boot.BundleFile, err)
		}
		if header.Name != ocispec.ImageIndexFile {
			continue
		}
		var index ocispec.Index
		if err := json.NewDecoder(files).Decode(&index); err != nil {
			return nil, fmt.Errorf("%s: %w", boot.BundleFile, err)
		}
		for _, m := range index.Manifests {
			if name := m.Annotations[ocispec.AnnotationRefName]; name != "" {
				names = append(names, name)
			}
		}
		return names, nil
	}
}

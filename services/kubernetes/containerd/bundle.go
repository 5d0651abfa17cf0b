package containerd

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	imagestore "github.com/containerd/containerd/v2/core/images"
	imagearchive "github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// importTimeout is for 1 GB from a medium with 1 MB/s.
	importTimeout = 20 * time.Minute
	// mediaPeriod is how often the list of devices is read, and none of them. A device that has come is used after one
	// more period: by then it is ready, and so are its partitions.
	mediaPeriod = 5 * time.Second
	maxIndex    = 4 << 20 // bytes; an image takes less than 1 kB
)

// watchMedia calls look after a disk or a medium has come or gone.
func watchMedia(ctx context.Context, seen string, devices func() string, look func()) {
	for before := seen; sleep.For(ctx, mediaPeriod); {
		now := devices()
		if now == before && now != seen {
			seen = now
			look()
		}
		before = now
	}
}

// importBundle takes the images that media in the machine have (gbctl media build --images), unless they are there.
// What they have replaces nothing: an image that was pulled stays. Whatever is wrong with them, the node can still
// pull.
func (c *Containerd) importBundle(ctx context.Context, h *dag.Handle) {
	err := c.bundles(ctx, func(ctx context.Context, from archive) error {
		cfg, err := configuration.Config(c.Store)
		if err != nil {
			return err
		}
		wanted := from.wanted(ctx, cfg)
		return errors.Join(c.take(ctx, from, Namespace, wanted[Namespace], h.Event), c.take(ctx, from, PodNamespace, wanted[PodNamespace], h.Event))
	})
	if err != nil {
		h.Log.Error("images of a medium aren't used", "err", err)
	}
}

// fromMedium takes an image from a medium if one has it.
func (c *Containerd) fromMedium(ctx context.Context, namespace, ref string) {
	log := c.Logs.Logger(ID)
	err := c.bundles(ctx, func(ctx context.Context, from archive) error {
		for name := range from.images {
			if known(namespace, name) == ref {
				return c.take(ctx, from, namespace, []string{name}, func(text string) { log.Info(text) })
			}
		}
		return nil
	})
	if err != nil {
		log.Error("an image of a medium isn't used", "image", ref, "err", err)
	}
}

// onMedium is the digest of an image that a medium has; empty: none has it.
func (c *Containerd) onMedium(ctx context.Context, ref string, rules config.Images) (of string, err error) {
	err = c.bundles(ctx, func(ctx context.Context, from archive) error {
		d, has := from.images[ref]
		if !has {
			return nil
		}
		err := acceptBundled(ctx, from, ref, known(PodNamespace, ref), rules)
		if err == nil {
			of = d.Digest.String()
		}
		return err
	})
	return of, err
}

// bundles calls use with the archive of each medium that has one.
func (c *Containerd) bundles(ctx context.Context, use func(context.Context, archive) error) error {
	if c.Volume == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, importTimeout)
	defer cancel()
	var errs []error
	for _, label := range []string{boot.MediumLabel, boot.ISOLabel} {
		err := c.Volume(ctx, label, func(files fs.FS) error {
			if err := withBundle(ctx, files, use); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("medium %s: %w", label, err))
			}
			return boot.ErrNone // another volume with this label may have images, too
		})
		if !errors.Is(err, boot.ErrNone) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func withBundle(ctx context.Context, files fs.FS, use func(context.Context, archive) error) error {
	file, err := files.Open(boot.BundleFile)
	if err != nil {
		return err
	}
	defer file.Close()
	in, ok := file.(io.ReadSeeker)
	if !ok {
		return fmt.Errorf("%s can't be read twice", boot.BundleFile)
	}
	images, err := archiveImages(in)
	if err != nil {
		return err
	}
	return use(ctx, archive{in, images})
}

// wanted are the images of an archive that the node takes as soon as it sees them, by namespace. An installer image
// waits for the installation or upgrade that wants it (Fetch): nothing else runs it.
func (a archive) wanted(ctx context.Context, cfg *config.Config) map[string][]string {
	by := map[string][]string{}
	for name := range a.images {
		switch {
		case signatureTag.MatchString(name):
		case name == cfg.Cluster.Etcd.Image, name == cfg.Machine.Kubelet.Image:
			by[Namespace] = append(by[Namespace], name)
		case name != cfg.Machine.Install.Image && !a.installer(ctx, name):
			by[PodNamespace] = append(by[PodNamespace], name)
		}
	}
	return by
}

// installer reports whether an image is marked as one that a system is installed from. An image that can't be read
// isn't.
func (a archive) installer(ctx context.Context, name string) bool {
	m, err := readJSON[ocispec.Manifest](ctx, a, a.images[name])
	if err != nil {
		return false
	}
	image, err := readJSON[ocispec.Image](ctx, a, m.Config)
	_, marked := image.Config.Labels[esp.InstallerLabel]
	return err == nil && marked
}

// take imports images of an archive into a namespace, unless they are there.
func (c *Containerd) take(ctx context.Context, from archive, namespace string, names []string, event func(string)) error {
	cfg, err := configuration.Config(c.Store)
	cl, unreached := c.Client()
	if err = cmp.Or(err, unreached); err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, namespace)
	var missing []string
	var errs []error
	for _, name := range names {
		if _, err := cl.ImageService().Get(ctx, known(namespace, name)); err == nil {
			continue
		}
		if err := acceptBundled(ctx, from, name, known(namespace, name), cfg.Machine.Images); err != nil {
			errs = append(errs, err)
			continue
		}
		missing = append(missing, name)
	}
	if len(missing) == 0 {
		return errors.Join(errs...)
	}
	event(fmt.Sprintf("importing %d images of the medium for %s", len(missing), namespace))
	ctx, done, err := cl.WithLease(ctx)
	if err != nil {
		return err
	}
	defer done(context.WithoutCancel(ctx)) // what no image has is collected
	return errors.Join(append(errs, from.into(ctx, cl.ImageService(), cl.ContentStore(), namespace, missing))...)
}

// into makes images of an archive. It takes the content only: an archive can have other names for containerd than the
// ones that were looked at (io.containerd.image.name).
func (a archive) into(ctx context.Context, images imagestore.Store, store content.Store, namespace string, names []string) error {
	if _, err := a.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := imagearchive.ImportIndex(ctx, store, a); err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if err := create(ctx, images, store, imagestore.Image{Name: known(namespace, name), Target: a.images[name]}); err != nil {
			errs = append(errs, fmt.Errorf("%s: %s %w", boot.BundleFile, name, err))
		}
	}
	return errors.Join(errs...)
}

// create makes an image of content that is there, unless it exists. containerd stores a part that is damaged as what it
// is: the image lacks the part that it should be.
func create(ctx context.Context, images imagestore.Store, store content.Store, i imagestore.Image) error {
	_, _, _, missing, err := imagestore.Check(ctx, store, i.Target, platforms.Default())
	switch {
	case err != nil:
		return fmt.Errorf("can't be read: %w", err)
	case len(missing) > 0:
		return fmt.Errorf("is damaged: it lacks %s", missing[0].Digest)
	}
	keep := imagestore.SetChildrenLabels(store, imagestore.FilterPlatforms(imagestore.ChildrenHandler(store), platforms.Default()))
	if err := imagestore.Walk(ctx, keep, i.Target); err != nil {
		return fmt.Errorf("can't be kept: %w", err)
	}
	if _, err = images.Create(ctx, i); errdefs.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// acceptBundled compares an image of an archive with the digest in its name, and verifies it if there is a rule for its
// name on the node. Its signatures are in the archive, too.
func acceptBundled(ctx context.Context, from archive, name, image string, rules config.Images) error {
	if _, pinned, given := strings.Cut(name, "@"); given && pinned != from.images[name].Digest.String() {
		return fmt.Errorf("%s: what it has as %s is another image, %s", boot.BundleFile, name, from.images[name].Digest)
	}
	rule := rules.Rule(image)
	if rule == nil {
		return nil
	}
	return verify(ctx, image, from.images[name].Digest, rule, from)
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
	if err := json.NewDecoder(io.LimitReader(file, maxIndex)).Decode(&index); err != nil {
		return nil, fmt.Errorf("%s: %w", boot.BundleFile, err)
	}
	images := map[string]ocispec.Descriptor{}
	for _, m := range index.Manifests {
		if name := m.Annotations[ocispec.AnnotationRefName]; name != "" {
			images[name] = ocispec.Descriptor{MediaType: m.MediaType, Digest: m.Digest, Size: m.Size}
		}
	}
	return images, nil
}

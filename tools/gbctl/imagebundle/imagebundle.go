// Package imagebundle keeps container images in one file, an archive of the OCI image layout, for places without a
// registry of their own or without the internet.
//
//	registries ─▶ Bundle.Write ─▶ file ─┬▶ Serve ─▶ nodes
//	                                    └▶ Bundle.Push ─▶ registry
package imagebundle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

const (
	// bundleType begins the media type of a signature of cosign.
	bundleType = "application/vnd.dev.sigstore.bundle"
	// headerWait is for the few lines of a request.
	headerWait = 30 * time.Second
)

// signatureTag is the tag of an image's signatures in a bundle. Those without a suffix are an index.
var signatureTag = regexp.MustCompile(`^sha256-[0-9a-f]{64}(\.sig)?$`)

// Bundle says how images are pulled and pushed.
type Bundle struct {
	// Say gets the progress.
	Say func(line string)
	// Mirrors are the URLs of mirrors, by registry or "*".
	Mirrors map[string][]string
	// transport is another one than patient, for tests.
	transport http.RoundTripper
}

// Write pulls images into one file. It collects the images in a directory beside the file. After an interruption, what
// is there isn't pulled again.
func (b Bundle) Write(ctx context.Context, images []string, output string) error {
	dir := output + ".partial"
	to, err := begin(dir)
	if err != nil {
		return err
	}
	all := slices.Clone(images)
	for i, ref := range images {
		signatures, err := b.add(ctx, to, ref, fmt.Sprintf("%d of %d", i+1, len(images)))
		if err != nil {
			return fmt.Errorf("%w; what was pulled is in %s, and the same command continues", err, dir)
		}
		all = append(all, signatures...)
	}
	if err := only(to, all); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	b.Say("writing " + output)
	if err := oci.Pack(dir, output); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// begin opens the directory of a bundle, and removes what isn't what its name says: a command was cut off when it wrote
// that. Before, the index is made again, so that it never names what isn't there.
func begin(dir string) (to layout.Path, err error) {
	var damaged []string
	blobs, _ := filepath.Glob(filepath.Join(dir, "blobs/sha256/*")) // the pattern is well formed
	for _, path := range blobs {
		f, err := os.Open(path)
		if err != nil {
			return to, err
		}
		sum, _, err := v1.SHA256(f)
		f.Close()
		if err != nil || sum.Hex != filepath.Base(path) {
			damaged = append(damaged, path)
		}
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err == nil {
		_, err = index.IndexManifest()
	}
	if err == nil && len(damaged) == 0 {
		return layout.FromPath(dir)
	}
	to, err = layout.Write(dir, empty.Index)
	for _, path := range damaged {
		err = errors.Join(err, os.Remove(path))
	}
	return to, err
}

// only removes what an earlier command with other images has left.
func only(in layout.Path, images []string) error {
	err := in.RemoveDescriptors(func(d v1.Descriptor) bool { return !slices.Contains(images, d.Annotations[registry.RefAnnotation]) })
	if err != nil {
		return err
	}
	index, err := in.ImageIndex()
	if err != nil {
		return err
	}
	used := map[string]bool{}
	if err := mark(index, used); err != nil {
		return err
	}
	blobs, err := os.ReadDir(filepath.Join(string(in), "blobs/sha256"))
	for _, b := range blobs {
		if !used[b.Name()] {
			err = errors.Join(err, os.Remove(filepath.Join(string(in), "blobs/sha256", b.Name())))
		}
	}
	return err
}

// mark notes the content of all images in an index.
func mark(index v1.ImageIndex, used map[string]bool) error {
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		used[d.Digest.Hex] = true
		if d.MediaType.IsIndex() {
			inner, err := index.ImageIndex(d.Digest)
			if err == nil {
				err = mark(inner, used)
			}
			if err != nil {
				return err
			}
			continue
		}
		image, err := index.Image(d.Digest)
		if err != nil {
			return err
		}
		m, err := image.Manifest()
		if err != nil {
			return err
		}
		used[m.Config.Digest.Hex] = true
		for _, l := range m.Layers {
			used[l.Digest.Hex] = true
		}
	}
	return nil
}

// add adds an image, and its signatures of both formats. It returns the names of their lists.
func (b Bundle) add(ctx context.Context, to layout.Path, ref, count string) (lists []string, err error) {
	image, places, err := b.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	if err := b.store(to, image, ref, count); err != nil {
		return nil, err
	}
	digest, err := image.Digest()
	if err != nil {
		return nil, err
	}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	// Cosign names them like this, and nodes know them by the name of the image.
	tag := digest.Algorithm + "-" + digest.Hex
	list := strings.Replace(parsed.Context().Name(), name.DefaultRegistry+"/", "docker.io/", 1) + ":" + tag
	signed, err := b.signed(ctx, places, tag+".sig")
	if err != nil {
		return nil, fmt.Errorf("signatures of %s: %w", ref, err)
	}
	if signed != nil {
		lists = append(lists, list+".sig")
		if err := b.store(to, signed, list+".sig", count+", its signatures"); err != nil {
			return nil, err
		}
	}
	bundles, err := b.bundles(ctx, places, digest)
	if err != nil {
		return nil, fmt.Errorf("signatures of %s: %w", ref, err)
	}
	if len(bundles) == 0 {
		return lists, nil
	}
	b.Say(fmt.Sprintf("%s, its signatures: %s, %d", count, list, len(bundles)))
	err = to.ReplaceIndex(mutate.AppendManifests(empty.Index, bundles...), match.Name(list), layout.WithAnnotations(map[string]string{registry.RefAnnotation: list}))
	return append(lists, list), err
}

// lookFor asks the places that may have the signatures of an image, until one has some. The first one has the image,
// and must answer.
func (b Bundle) lookFor(ctx context.Context, places []place, ask func(in place) (found bool, err error)) error {
	for i, place := range places {
		found, err := ask(place)
		if found && err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && i == 0 {
			return err
		}
		if err != nil {
			b.Say(fmt.Sprintf("%s isn't asked for signatures: %v", place.ref.Context().RegistryStr(), err))
		}
	}
	return nil
}

func notFound(err error) bool {
	answer, ok := errors.AsType[*transport.Error](err)
	return ok && answer.StatusCode == http.StatusNotFound
}

// signed are the signatures with a tag; nil: there are none.
func (b Bundle) signed(ctx context.Context, places []place, tag string) (image v1.Image, err error) {
	err = b.lookFor(ctx, places, func(in place) (bool, error) {
		found, err := remote.Image(in.ref.Context().Tag(tag), b.options(ctx, in)...)
		if err == nil {
			image = found
		} else if notFound(err) {
			return false, nil
		}
		return image != nil, err
	})
	return image, err
}

// bundles are the signatures that refer to an image (cosign's BUNDLE_SPEC.md).
func (b Bundle) bundles(ctx context.Context, places []place, of v1.Hash) (found []mutate.IndexAddendum, err error) {
	err = b.lookFor(ctx, places, func(in place) (bool, error) {
		list, err := remote.Referrers(in.ref.Context().Digest(of.String()), b.options(ctx, in)...)
		if err != nil {
			return false, err // without a list, the answer is an empty one
		}
		found, err = b.signatures(ctx, in, list)
		return len(found) > 0, err
	})
	slices.SortFunc(found, func(a, b mutate.IndexAddendum) int { return cmp.Compare(a.Digest.Hex, b.Digest.Hex) })
	return found, err
}

// signatures are those in a list of what refers to an image.
func (b Bundle) signatures(ctx context.Context, in place, list v1.ImageIndex) (found []mutate.IndexAddendum, err error) {
	manifest, err := list.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, d := range manifest.Manifests {
		image, err := remote.Image(in.ref.Context().Digest(d.Digest.String()), b.options(ctx, in)...)
		if err != nil {
			return nil, err // it is in the list, so that it must be there
		}
		m, err := image.Manifest()
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(m.Layers, func(l v1.Descriptor) bool { return strings.HasPrefix(string(l.MediaType), bundleType) }) {
			found = append(found, mutate.IndexAddendum{Add: image, Descriptor: d})
		}
	}
	return found, nil
}

func (b Bundle) store(to layout.Path, image v1.Image, ref, count string) error {
	manifest, err := image.Manifest()
	if err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	if at, err := name.NewDigest(ref); err == nil {
		if digest, err := image.Digest(); err != nil || digest.String() != at.DigestStr() {
			return fmt.Errorf("%s has images of several platforms: name that of linux/amd64, %s@%s", ref, at.Context(), digest)
		}
	}
	size := manifest.Config.Size
	for _, l := range manifest.Layers {
		size += l.Size
	}
	b.Say(fmt.Sprintf("%s: %s, %d MB", count, ref, size/1e6))
	if there, err := has(to, image, ref); err != nil || there {
		return err
	}
	err = to.ReplaceImage(image, match.Name(ref), layout.WithAnnotations(map[string]string{registry.RefAnnotation: ref}))
	if err != nil {
		return fmt.Errorf("pull %s: %w", ref, err)
	}
	return nil
}

// has reports whether a layout has an image. The index names an image after its layers are there.
func has(in layout.Path, image v1.Image, ref string) (bool, error) {
	digest, err := image.Digest()
	if err != nil {
		return false, err
	}
	index, err := in.ImageIndex()
	if err != nil {
		return false, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(manifest.Manifests, func(d v1.Descriptor) bool {
		return d.Digest == digest && d.Annotations[registry.RefAnnotation] == ref
	}), nil
}

// find finds an image. The first of the places has it, and the others come after that one.
func (b Bundle) find(ctx context.Context, text string) (image v1.Image, places []place, err error) {
	ref, err := name.ParseReference(text)
	if err != nil {
		return nil, nil, err
	}
	if places, err = b.places(ref); err != nil {
		return nil, nil, err
	}
	var errs []error
	for i, at := range places {
		image, err := remote.Image(at.ref, append(b.options(ctx, at), remote.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"}))...)
		if err == nil {
			return image, places[i:], nil
		}
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		errs = append(errs, err)
	}
	return nil, nil, fmt.Errorf("pull %s: %w", text, errors.Join(errs...))
}

// Serve answers until ctx ends.
func Serve(ctx context.Context, l net.Listener, h http.Handler) error {
	server := &http.Server{Handler: h, ReadHeaderTimeout: headerWait}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Push copies all images of an archive to a registry, or to a project of it: the host of their names is replaced, and
// the path stays.
func (b Bundle) Push(ctx context.Context, archive *registry.Archive, host string, insecure bool) error {
	scheme := "https://"
	if insecure {
		scheme = "http://"
	}
	if err := registry.Check(archive); err != nil {
		return err
	}
	at, project, _ := strings.Cut(host, "/")
	return each(ctx, archive, true, func(ref name.Reference, count string, image v1.Image) error {
		to, err := mirrored(ref, scheme+at+"/v2/"+project)
		if err != nil {
			return fmt.Errorf("registry %q: must be a host, such as registry.example:5000", host)
		}
		b.Say(count + ": " + to.ref.String())
		if err := remote.Write(to.ref, image, b.options(ctx, to)...); err != nil {
			return fmt.Errorf("push %s: %w", to.ref, err)
		}
		return nil
	})
}

// each calls use with the images of an archive that have names, and, if wanted, with their signatures.
func each(ctx context.Context, archive *registry.Archive, signatures bool, use func(ref name.Reference, count string, image v1.Image) error) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	serving, stop := context.WithCancel(ctx)
	var served sync.WaitGroup
	defer served.Wait()
	defer stop()
	served.Go(func() { _ = Serve(serving, l, registry.Serve(archive)) }) // a failure is that of the requests below
	index, err := indexOf(archive)
	if err != nil {
		return err
	}
	for i, d := range index.Manifests {
		ref, err := name.ParseReference(d.Annotations[registry.RefAnnotation])
		if err != nil {
			continue // an image without a name can't be pulled from a registry, either
		}
		list := signatureTag.FindStringSubmatch(ref.Identifier())
		if list != nil && !signatures {
			continue
		}
		count := fmt.Sprintf("%d of %d", i+1, len(index.Manifests))
		parts := []name.Reference{ref}
		if list != nil && list[1] == "" { // bundles: a registry makes the list of them
			from, err := mirrored(ref, "http://"+l.Addr().String())
			if err == nil {
				parts, err = members(ctx, ref, from.ref)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", ref, err)
			}
		}
		for _, part := range parts {
			at, err := mirrored(part, "http://"+l.Addr().String())
			if err != nil {
				return err
			}
			image, err := remote.Image(at.ref, remote.WithContext(ctx))
			if err != nil {
				return fmt.Errorf("%s: %w", part, err)
			}
			if err := use(part, count, image); err != nil {
				return err
			}
		}
	}
	return nil
}

// members are the images in an index, by their digests.
func members(ctx context.Context, ref, from name.Reference) (all []name.Reference, err error) {
	index, err := remote.Index(from, remote.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, d := range manifest.Manifests {
		all = append(all, ref.Context().Digest(d.Digest.String()))
	}
	return all, nil
}

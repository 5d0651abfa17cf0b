package containerd

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ecdsa"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/garboard-os/garboard/config"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func newSignedImage() signedImage {
	return signedImage{map[string]ocispec.Descriptor{}, nil, map[digest.Digest][]byte{}}
}

// bundle signs an image in the format with bundles.
func (s *signedImage) bundle(t *testing.T, key *ecdsa.PrivateKey, of digest.Digest) {
	t.Helper()
	payload := fmt.Sprintf(`{"predicateType":%q,"subject":[{"digest":{"sha256":%q}}]}`, signPredicate, of.Encoded())
	made := signText(t, key, fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(statementType), statementType, len(payload), payload))
	type object = map[string]any
	layer := s.add(t, object{"dsseEnvelope": object{"payload": []byte(payload), "payloadType": statementType, "signatures": []object{{"sig": made}}}})
	layer.MediaType = bundleType + ".v0.3+json"
	s.referring = []ocispec.Descriptor{s.add(t, ocispec.Manifest{Layers: []ocispec.Descriptor{layer}})}
}

// archive is the image with its signatures in a file.
func (s *signedImage) archive(t *testing.T) archive {
	t.Helper()
	if s.referring != nil {
		name, err := listName(testImage, s.lists[testImage].Digest)
		if err != nil {
			t.Fatal(err)
		}
		s.lists[name] = s.add(t, ocispec.Index{Manifests: s.referring})
	}
	var index ocispec.Index
	for _, name := range slices.Sorted(maps.Keys(s.lists)) {
		d := s.lists[name]
		d.Annotations = map[string]string{ocispec.AnnotationRefName: name}
		index.Manifests = append(index.Manifests, d)
	}
	text, err := json.Marshal(index)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(name string, content []byte) {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	for d, part := range s.parts {
		put(path.Join(ocispec.ImageBlobsDir, "sha256", d.Encoded()), part)
	}
	put(ocispec.ImageIndexFile, text)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	in := bytes.NewReader(b.Bytes())
	images, err := archiveImages(in)
	if err != nil {
		t.Fatal(err)
	}
	return archive{in, images}
}

// The signatures of both formats are found in the file that has the image.
func TestAcceptBundled(t *testing.T) {
	t.Parallel()
	of, key := digest.FromString("image"), newKey(t)
	rules := config.Images{Verify: []config.ImageRule{{Prefix: "registry.example/", Keys: []config.PEM{public(t, key.Public())}}}}
	damage := func(s *signedImage) {
		for d, part := range s.parts {
			s.parts[d] = bytes.ToUpper(part)
		}
	}
	for name, c := range map[string]struct {
		make  func(*signedImage)
		rules config.Images
		want  string
	}{
		"no rule":         {make: func(*signedImage) {}},
		"unsigned":        {make: func(*signedImage) {}, rules: rules, want: "it has no signature of cosign"},
		"with a tag":      {make: func(s *signedImage) { s.sign(t, key, of, signedType, nil, nil) }, rules: rules},
		"bundle":          {make: func(s *signedImage) { s.bundle(t, key, of) }, rules: rules},
		"another key":     {make: func(s *signedImage) { s.bundle(t, newKey(t), of) }, rules: rules, want: "a signature is of another key"},
		"another image":   {make: func(s *signedImage) { s.bundle(t, key, digest.FromString("other")) }, rules: rules, want: "a signature is for sha256:"},
		"damaged":         {make: func(s *signedImage) { s.sign(t, key, of, signedType, nil, nil); damage(s) }, rules: rules, want: "is damaged"},
		"damaged bundle":  {make: func(s *signedImage) { s.bundle(t, key, of); damage(s) }, rules: rules, want: "is damaged"},
		"without a part":  {make: func(s *signedImage) { s.sign(t, key, of, signedType, nil, nil); clear(s.parts) }, rules: rules, want: "images.tar: no blobs/sha256/"},
		"refers to a gap": {make: func(s *signedImage) { s.bundle(t, key, of); clear(s.parts) }, rules: rules, want: "images.tar: no blobs/sha256/"},
	} {
		s := newSignedImage()
		s.lists[testImage] = ocispec.Descriptor{Digest: of}
		c.make(&s)
		err := acceptBundled(t.Context(), s.archive(t), testImage, testImage, c.rules)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// A name with a digest is that of one image only.
func TestBundledByDigest(t *testing.T) {
	t.Parallel()
	s, of, other := newSignedImage(), digest.FromString("image"), digest.FromString("other")
	for name, is := range map[string]digest.Digest{testImage + "@" + of.String(): of, testImage + "@" + other.String(): of} {
		s.lists[name] = ocispec.Descriptor{Digest: is}
		err := acceptBundled(t.Context(), s.archive(t), name, name, config.Images{})
		if mine := strings.HasSuffix(name, of.String()); mine != (err == nil) || !mine && !strings.Contains(err.Error(), "another image, "+of.String()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// movable is a registry in which the image can be replaced.
type movable struct {
	signedImage
	now *ocispec.Descriptor
}

func (m movable) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	if ref == testImage {
		return ref, *m.now, nil
	}
	d, err := m.find(ctx, ref)
	return ref, d, err
}

func (m movable) Fetcher(context.Context, string) (remotes.Fetcher, error) { return m, nil }

func (m movable) Pusher(context.Context, string) (remotes.Pusher, error) { return nil, nil }

func (m movable) Fetch(_ context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m.parts[d.Digest])), nil
}

func (m movable) FetchReferrers(context.Context, digest.Digest, ...remotes.FetchReferrersOpt) ([]ocispec.Descriptor, error) {
	return m.referring, nil
}

// An image that is replaced after it was verified isn't pulled: what is pulled is what was verified.
func TestReplacedImage(t *testing.T) {
	t.Parallel()
	of, key := digest.FromString("image"), newKey(t)
	rules := config.Images{Verify: []config.ImageRule{{Prefix: "registry.example/", Keys: []config.PEM{public(t, key.Public())}}}}
	s := newSignedImage()
	s.sign(t, key, of, signedType, nil, nil)
	from := movable{s, &ocispec.Descriptor{Digest: of}}
	accepted, err := accept(t.Context(), from, testImage, rules)
	if err != nil {
		t.Fatal(err)
	}
	*from.now = ocispec.Descriptor{Digest: digest.FromString("evil")}
	if _, d, err := accepted.Resolve(t.Context(), testImage); err != nil || d.Digest != of {
		t.Errorf("%s is pulled, and %s was verified (%v)", d.Digest, of, err)
	}
	if _, err := accept(t.Context(), from, testImage, rules); err == nil || !strings.Contains(err.Error(), "it has no signature of cosign") {
		t.Errorf("the other image: %v", err)
	}
	other := "registry.example/team/other:1"
	from.lists[other] = ocispec.Descriptor{Digest: "sha256:00"}
	if _, d, err := accepted.Resolve(t.Context(), other); err != nil || d.Digest != "sha256:00" {
		t.Errorf("another name: %s, %v", d.Digest, err)
	}
}

package containerd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// A medium that comes later is looked at once, as soon as the list of devices stays as it is.
func TestMediumThatComesLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		lists := []string{"sda", "sda", "sda sdb", "sda sdb sdb1", "sda sdb sdb1", "sda sdb sdb1", "sda", "sda"}
		var looks []int
		n := 0
		watchMedia(ctx, "sda", func() string {
			n++
			if n == len(lists) {
				cancel()
			}
			return lists[n-1]
		}, func() { looks = append(looks, n) })
		if !slices.Equal(looks, []int{5, 8}) {
			t.Errorf("looked after the lists %v", looks)
		}
	})
}

// volumes has several volumes of one label.
func volumes(all ...fs.FS) boot.Mounter {
	return func(_ context.Context, label string, use func(fs.FS) error) error {
		for _, files := range all {
			if err := use(files); label != boot.MediumLabel || !errors.Is(err, boot.ErrNone) {
				return err
			}
		}
		return boot.ErrNone
	}
}

// file is a medium with images.
func (a archive) file(t *testing.T) fs.FS {
	t.Helper()
	content, err := io.ReadAll(io.NewSectionReader(a.ReadSeeker.(*bytes.Reader), 0, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	return fstest.MapFS{boot.BundleFile: {Data: content}}
}

// All media with images are used, also beside one that is damaged. An image counts as there if it is on one of them,
// and accepted.
func TestImagesOnMedia(t *testing.T) {
	t.Parallel()
	of, key := digest.FromString("image"), newKey(t)
	signed, unsigned := newSignedImage(), newSignedImage()
	signed.lists[testImage] = ocispec.Descriptor{Digest: of}
	signed.sign(t, key, of, signedType, nil, nil)
	unsigned.lists["registry.example/team/other:1"] = ocispec.Descriptor{Digest: digest.FromString("other")}
	rules := config.Images{Verify: []config.ImageRule{{Prefix: "registry.example/", Keys: []config.PEM{public(t, key.Public())}}}}
	system, damaged := fstest.MapFS{esp.MediumFile: {Data: []byte("{}")}}, fstest.MapFS{boot.BundleFile: {Data: []byte("no archive")}}
	c := &Containerd{Options: Options{Volume: volumes(system, damaged, unsigned.archive(t).file(t), signed.archive(t).file(t))}}
	for _, tc := range []struct {
		image, of, want string
		rules           config.Images
	}{
		{testImage, of.String(), "images.tar: ", rules}, // what is said of the damaged one
		{"registry.example/team/other:1", "", "it has no signature of cosign", rules},
		{"registry.example/team/other:1", digest.FromString("other").String(), "images.tar: ", config.Images{}},
		{"registry.example/team/absent:1", "", "images.tar: ", config.Images{}},
	} {
		if got, err := c.onMedium(t.Context(), tc.image, tc.rules); got != tc.of || err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %q, %v; want %q, %q", tc.image, got, err, tc.of, tc.want)
		}
	}
	c.Volume = volumes(system)
	if got, err := c.onMedium(t.Context(), testImage, rules); got != "" || err != nil {
		t.Errorf("without images: %q, %v", got, err)
	}
	c.Volume = nil
	if got, err := c.onMedium(t.Context(), testImage, rules); got != "" || err != nil {
		t.Errorf("in a container: %q, %v", got, err)
	}
}

// What a node runs itself is for containerd's namespace of the system, an installer image is taken when a system is
// made of it, and all others are for pods.
func TestImagesThatAreTaken(t *testing.T) {
	t.Parallel()
	s := newSignedImage()
	add := func(name string, labels map[string]string) {
		image := s.add(t, ocispec.Image{Author: name, Config: ocispec.ImageConfig{Labels: labels}})
		s.lists[name] = s.add(t, ocispec.Manifest{Config: image})
	}
	for _, name := range []string{"a/etcd:1", "a/kubelet:1", "a/pause:1", "a/installer:1", "a/pause:sha256-" + strings.Repeat("0", 64)} {
		add(name, nil)
	}
	add("a/custom:1", map[string]string{esp.InstallerLabel: "v1"})
	add("a/web:1", map[string]string{"maintainer": "web"})
	s.lists["a/broken:1"] = ocispec.Descriptor{Digest: digest.FromString("absent")}
	cfg := &config.Config{}
	cfg.Cluster.Etcd.Image, cfg.Machine.Kubelet.Image, cfg.Machine.Install.Image = "a/etcd:1", "a/kubelet:1", "a/installer:1"
	got := s.archive(t).wanted(t.Context(), cfg)
	for namespace, want := range map[string][]string{Namespace: {"a/etcd:1", "a/kubelet:1"}, PodNamespace: {"a/broken:1", "a/pause:1", "a/web:1"}} {
		slices.Sort(got[namespace])
		if !slices.Equal(got[namespace], want) {
			t.Errorf("%s: %q, want %q", namespace, got[namespace], want)
		}
	}
	if len(got) != 2 {
		t.Errorf("%q", got)
	}
}

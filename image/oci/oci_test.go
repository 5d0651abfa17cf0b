package oci

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
)

// sources makes tiny stand-ins for what components.Build and containerTools leave.
func sources(t *testing.T) (binaries map[string]string, tools string) {
	t.Helper()
	write := func(path, content string) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	binaries = map[string]string{}
	for _, c := range components.All {
		dir := filepath.Join(t.TempDir(), c.Name)
		binaries[c.Name] = dir
		for _, name := range c.Files {
			write(filepath.Join(dir, name), "program "+name+" "+c.Version)
		}
	}
	tools = t.TempDir()
	write(filepath.Join(tools, toolTree, "usr/sbin/nft"), "nft")
	if err := os.Symlink("nft", filepath.Join(tools, toolTree, "usr/sbin/iptables")); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(tools, caBundle), "certificates")
	return binaries, tools
}

// allImages are those with every version of Kubernetes.
func allImages() []Image {
	binaries := map[string]string{}
	for _, c := range components.All {
		binaries[c.Name] = c.Name
	}
	return imagesOf(binaries)
}

func build(t *testing.T) string {
	t.Helper()
	binaries, tools := sources(t)
	dir := t.TempDir()
	if err := writeLayout(t.Context(), dir, imagesOf(binaries), func(name string) (layer, error) { return layerOf(name, binaries, tools) }); err != nil {
		t.Fatal(err)
	}
	return dir
}

// image reads one image back.
func image(t *testing.T, dir, ref string) v1.Image {
	t.Helper()
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range manifest.Manifests {
		if d.Annotations[refAnnotation] == ref {
			found, err := index.Image(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			return found
		}
	}
	t.Fatalf("no image %s in the layout", ref)
	return nil
}

func TestImagesAreThoseOfTheDefaultConfiguration(t *testing.T) {
	var refs []string
	for _, i := range imagesOf(map[string]string{"kubernetes": "/"}) {
		refs = append(refs, i.Ref)
	}
	all := (&config.Config{Cluster: config.Cluster{Network: config.ClusterNetwork{Policies: true}}}).Images()
	if diff := cmp.Diff(all, refs); diff != "" {
		t.Error(diff)
	}
	for _, i := range allImages() {
		for _, name := range i.Layers {
			if _, err := layerOf(name, nil, ""); err != nil {
				t.Errorf("%s: %v", i.Ref, err)
			}
		}
	}
}

// a version that was built has the images that a configuration with this version names, and no others.
func TestFurtherKubernetesVersions(t *testing.T) {
	var want, got []string
	for _, further := range components.Kubernetes()[1:] {
		c, err := config.Generate(config.Options{Endpoint: "https://10.5.0.2:6443", KubernetesVersion: further.Version})
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, c.Machine.Kubelet.Image, c.Cluster.APIServer.Image, c.Cluster.ControllerManager.Image, c.Cluster.Scheduler.Image, c.Cluster.Proxy.Image)
	}
	for _, i := range allImages()[len(images):] {
		if i.Ref != PodCheckpointerImage {
			got = append(got, i.Ref)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) == 0 {
		t.Error(diff)
	}
	dir := build(t)
	for _, ref := range append(got, config.DefaultAPIServerImage) {
		unpacked := t.TempDir()
		untar(t, mutate.Extract(image(t, dir, ref)), unpacked)
		_, version, _ := strings.Cut(ref, ":")
		if got, err := os.ReadFile(filepath.Join(unpacked, "usr/local/bin/kubelet")); err != nil || string(got) != "program kubernetes "+version {
			t.Errorf("%s has %q, %v", ref, got, err)
		}
	}
}

// The tags are promises about what is inside.
func TestVersionsAgreeWithComponents(t *testing.T) {
	for tag, version := range map[string]string{
		config.KubernetesVersion: components.KubernetesVersion,
		config.CoreDNSVersion:    components.CoreDNSVersion,
		config.FlannelVersion:    components.FlannelVersion,
		config.PoliciesVersion:   components.PoliciesVersion,
		config.PauseVersion:      components.PauseVersion,
		// -0 is the publisher's count of rebuilds
		"v" + strings.TrimSuffix(config.EtcdVersion, "-0"): components.EtcdVersion,
	} {
		if tag != version {
			t.Errorf("image is tagged %s, but holds %s", tag, version)
		}
	}
}

// checkDigests reads a layer both ways and compares with what the manifest and the configuration say.
func checkDigests(l v1.Layer) error {
	for _, way := range []struct {
		open func() (io.ReadCloser, error)
		want func() (v1.Hash, error)
	}{{l.Compressed, l.Digest}, {l.Uncompressed, l.DiffID}} {
		content, err := way.open()
		if err != nil {
			return err
		}
		defer content.Close()
		got, _, err := v1.SHA256(content)
		if err != nil {
			return err
		}
		if want, err := way.want(); err != nil || got != want {
			return fmt.Errorf("hash is %s, want %s, %v", got, want, err)
		}
	}
	return nil
}

func TestLayoutIsValid(t *testing.T) {
	dir := build(t)
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index, validate.Fast); err != nil { // the slow way knows gzip only
		t.Error(err)
	}
	for _, i := range allImages() {
		stack, err := image(t, dir, i.Ref).Layers()
		if err != nil {
			t.Fatal(err)
		}
		for n, l := range stack {
			if err := checkDigests(l); err != nil {
				t.Errorf("%s: layer %s: %v", i.Ref, i.Layers[n], err)
			}
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// digest is the hash of names and contents of all files below dir.
func digest(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		io.WriteString(h, strings.TrimPrefix(path, dir)+"\x00"+string(content)+"\x00")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func TestTwoBuildsAreByteIdentical(t *testing.T) {
	first, second := build(t), build(t) // from different directories, with files of different times
	if digest(t, first) != digest(t, second) {
		t.Errorf("%s and %s differ", first, second)
	}
}

func TestKubernetesImagesShareOneLayer(t *testing.T) {
	dir := build(t)
	second := map[string]bool{}
	for _, ref := range []string{config.DefaultAPIServerImage, config.DefaultControllerManagerImage, config.DefaultSchedulerImage, config.DefaultProxyImage, config.DefaultKubeletImage} {
		stack, err := image(t, dir, ref).Layers()
		if err != nil {
			t.Fatal(err)
		}
		d, err := stack[1].DiffID()
		if err != nil {
			t.Fatal(err)
		}
		second[d.String()] = true
	}
	if len(second) != 1 {
		t.Errorf("%d different layers", len(second))
	}
	blobs, err := os.ReadDir(filepath.Join(dir, "blobs", "sha256"))
	if err != nil {
		t.Fatal(err)
	}
	layers := map[string]bool{}
	for _, i := range allImages() {
		for _, name := range i.Layers {
			layers[name] = true
		}
	}
	if got, want := len(blobs), 2*len(allImages())+len(layers); got != want {
		t.Errorf("%d blobs; with a manifest and a configuration per image and each layer once it would be %d", got, want)
	}
}

func TestProgramsAreWhereTheImageStartsThem(t *testing.T) {
	dir := build(t)
	for _, i := range allImages() {
		unpacked := t.TempDir()
		untar(t, mutate.Extract(image(t, dir, i.Ref)), unpacked)
		config, err := image(t, dir, i.Ref).ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		start := slices.Concat(config.Config.Entrypoint, config.Config.Cmd)
		if len(start) != 1 {
			t.Errorf("%s starts %v", i.Ref, start)
			continue
		}
		content, err := os.ReadFile(filepath.Join(unpacked, start[0]))
		if err != nil || !strings.HasPrefix(string(content), "program ") {
			t.Errorf("%s: %s is %q, %v", i.Ref, start[0], content, err)
		}
		if !config.Created.Equal(time.Unix(0, 0)) {
			t.Errorf("%s: created %v", i.Ref, config.Created)
		}
	}
}

func TestKubeletImageHasTheTools(t *testing.T) {
	unpacked := t.TempDir()
	untar(t, mutate.Extract(image(t, build(t), config.DefaultKubeletImage)), unpacked)
	for path, want := range map[string]string{"sbin/iptables": "nft", "etc/ssl/certs/ca-certificates.crt": "certificates", "usr/local/bin/kubectl": "program kubernetes " + config.KubernetesVersion} {
		if got, err := os.ReadFile(filepath.Join(unpacked, path)); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v; want %q", path, got, err, want)
		}
	}
	if info, err := os.Stat(filepath.Join(unpacked, "tmp")); err != nil || info.Mode()&fs.ModeSticky == 0 || info.Mode().Perm() != 0o777 {
		t.Errorf("/tmp: %v, %v", info, err)
	}
}

package oci

import (
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/squashfs"
)

// Image is one image of the layout. Where it has a publisher, its name, its paths and how it is started are the
// publisher's, so that a manifest doesn't have to know which of the two it gets.
type Image struct {
	Ref        string   // the name by which nodes pull it
	Layers     []string // from the bottom up: names of components, and base and tools (layerOf)
	User       string
	Entrypoint []string
	Cmd        []string
	WorkingDir string
	// OnBuild are instructions for those who build an image from this one.
	OnBuild []string
	// Labels of the image, which those that are built from it inherit.
	Labels map[string]string
	// Gzip is for layers that builders of images can read, too: not all of them know zstd.
	Gzip bool
}

// Numeric users, as the publishers have them: a number lets a pod ask for runAsNonRoot without the kubelet looking into
// /etc/passwd.
const (
	nonRootUser = "65532:65532"
	pauseUser   = "65535:65535"
)

// images are in the order of config.Images: what a node needs first comes first. Images that share layers share them
// from the bottom up, because a node unpacks a layer once for each different stack below it.
//
// Kubernetes' and etcd's publishers leave the entry point to the manifest, whose command names the program; a Cmd does
// the same for those who run the image as it is, and gives way to any command. Kubelet images have no publisher to
// follow.
var images = []Image{
	{Ref: config.DefaultEtcdImage, Layers: []string{"base", "etcd"}, Cmd: []string{"/usr/local/bin/etcd"}},
	{Ref: config.DefaultKubeletImage, Layers: []string{"base", "kubernetes", "tools"}, Entrypoint: []string{"/usr/local/bin/kubelet"}},
	{Ref: config.DefaultPauseImage, Layers: []string{"pause"}, Entrypoint: []string{"/pause"}, User: pauseUser},
	{Ref: config.DefaultAPIServerImage, Layers: []string{"base", "kubernetes"}, Cmd: []string{"/usr/local/bin/kube-apiserver"}},
	{Ref: config.DefaultControllerManagerImage, Layers: []string{"base", "kubernetes"}, Cmd: []string{"/usr/local/bin/kube-controller-manager"}},
	{Ref: config.DefaultSchedulerImage, Layers: []string{"base", "kubernetes"}, Cmd: []string{"/usr/local/bin/kube-scheduler"}},
	{Ref: config.DefaultProxyImage, Layers: []string{"base", "kubernetes", "tools"}, Cmd: []string{"/usr/local/bin/kube-proxy"}},
	{Ref: config.DefaultFlannelImage, Layers: []string{"base", "tools", "flannel"}, Entrypoint: []string{"/opt/bin/flanneld"}},
	{Ref: config.DefaultPoliciesImage, Layers: []string{"base", "kube-network-policies"}, Cmd: []string{"/bin/netpol"}},
	{Ref: config.DefaultCoreDNSImage, Layers: []string{"base", "coredns"}, Entrypoint: []string{"/coredns"}, User: nonRootUser, WorkingDir: "/"},
}

// PodCheckpointerImage is only for development clusters with a self-hosted control plane: no node needs it otherwise.
const PodCheckpointerImage = "ghcr.io/garboard-os/pod-checkpointer:" + components.PodCheckpointerVersion

var podCheckpointer = Image{Ref: PodCheckpointerImage, Layers: []string{"base", components.PodCheckpointer}, Entrypoint: []string{"/usr/local/bin/pod-checkpointer"}}

// imagesOf lists the images that are made of the components that were built: those of the table, those of Kubernetes
// once more for each further version, and the pod-checkpointer's.
func imagesOf(binaries map[string]string) []Image {
	all := slices.Clone(images)
	if binaries[components.PodCheckpointer] != "" {
		all = append(all, podCheckpointer)
	}
	for _, c := range components.Kubernetes()[1:] { // all but the default version
		for _, i := range images {
			if at := slices.Index(i.Layers, "kubernetes"); at >= 0 && binaries[c.Name] != "" {
				i.Layers = slices.Replace(slices.Clone(i.Layers), at, at+1, c.Name)
				i.Ref = strings.TrimSuffix(i.Ref, config.KubernetesVersion) + c.Version
				all = append(all, i)
			}
		}
	}
	return all
}

// base is what all images have but pause, besides the authorities.
var base = squashfs.Tree{
	"bin":               squashfs.Link("usr/bin"),
	"sbin":              squashfs.Link("usr/sbin"),
	"lib":               squashfs.Link("usr/lib"),
	"lib64":             squashfs.Link("usr/lib64"),
	"usr/bin":           squashfs.Directory(0o755),
	"usr/sbin":          squashfs.Directory(0o755),
	"usr/lib":           squashfs.Directory(0o755),
	"usr/lib64":         squashfs.Directory(0o755),
	"dev":               squashfs.Directory(0o755),
	"proc":              squashfs.Directory(0o755),
	"sys":               squashfs.Directory(0o755),
	"run":               squashfs.Directory(0o755),
	"root":              squashfs.Directory(0o700),
	"tmp":               squashfs.Directory(0o777 | fs.ModeSticky),
	"var/run":           squashfs.Link("../run"),
	"var/tmp":           squashfs.Directory(0o777 | fs.ModeSticky),
	"etc/passwd":        squashfs.Content([]byte("root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n"), 0o644),
	"etc/group":         squashfs.Content([]byte("root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n"), 0o644),
	"etc/nsswitch.conf": squashfs.Content([]byte("hosts: files dns\n"), 0o644),
}

// places are the directories of components' programs where their publishers have others than usr/local/bin.
var places = map[string]string{
	"coredns": "", "pause": "", "flannel": "opt/bin",
	"kube-network-policies": "usr/bin", // the publisher's /bin, which is a link
}

// layerOf is the content of a layer: of the base, of the container tools, or of a component (name → directory).
func layerOf(name string, binaries map[string]string, tools string) (layer, error) {
	switch name {
	case "base":
		return layer{map[string]string{"etc/ssl/certs/ca-certificates.crt": filepath.Join(tools, caBundle)}, base}, nil
	case "tools":
		return layer{files: map[string]string{"": filepath.Join(tools, toolTree)}}, nil
	}
	c, err := components.ByName(name)
	if err != nil {
		return layer{}, err
	}
	place, apart := places[name]
	if !apart {
		place = "usr/local/bin"
	}
	program, links := c.Files[0], squashfs.Tree{}
	for _, other := range c.Files[1:] {
		links[path.Join(place, other)] = squashfs.Link(program)
	}
	return layer{map[string]string{path.Join(place, program): filepath.Join(binaries[name], program)}, links}, nil
}

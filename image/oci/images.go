package oci

import (
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
)

// Image is one image of the layout. Where it has a publisher, its name, its paths and how it is started are the
// publisher's, so that a manifest doesn't have to know which of the two it gets.
type Image struct {
	Ref        string   // the name by which nodes pull it
	Layers     []string // from the bottom up: keys of the table layers
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

// layers are the contents of each layer: from what was built (components' name → directory) and from the container
// tools.
var layers = map[string]func(binaries map[string]string, tools string) tree{
	"base": func(_ map[string]string, tools string) tree {
		return tree{
			"bin":                               link("usr/bin"),
			"sbin":                              link("usr/sbin"),
			"lib":                               link("usr/lib"),
			"lib64":                             link("usr/lib64"),
			"usr/bin":                           directory(0o755),
			"usr/sbin":                          directory(0o755),
			"usr/lib":                           directory(0o755),
			"usr/lib64":                         directory(0o755),
			"dev":                               directory(0o755),
			"proc":                              directory(0o755),
			"sys":                               directory(0o755),
			"run":                               directory(0o755),
			"root":                              directory(0o700),
			"tmp":                               directory(0o1777),
			"var/run":                           link("../run"),
			"var/tmp":                           directory(0o1777),
			"etc/passwd":                        text("root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n"),
			"etc/group":                         text("root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n"),
			"etc/nsswitch.conf":                 text("hosts: files dns\n"),
			"etc/ssl/certs/ca-certificates.crt": copyOf(tools+"/"+caBundle, 0o644),
		}
	},
	"kubernetes":          kubernetesLayer("kubernetes"),
	"kubernetes-1.35":     kubernetesLayer("kubernetes-1.35"),
	"kubernetes-1.36":     kubernetesLayer("kubernetes-1.36"),
	"kubernetes-relinked": kubernetesLayer("kubernetes-relinked"),
	"etcd": func(binaries map[string]string, _ string) tree {
		return tree{
			"usr/local/bin/etcd":    copyOf(binaries["etcd"]+"/etcd", 0o755),
			"usr/local/bin/etcdctl": link("etcd"),
			"usr/local/bin/etcdutl": link("etcd"),
		}
	},
	"tools": func(_ map[string]string, tools string) tree { return tree{"": below(tools + "/" + toolTree)} },
	"coredns": func(binaries map[string]string, _ string) tree {
		return tree{"coredns": copyOf(binaries["coredns"]+"/coredns", 0o755)}
	},
	"flannel": func(binaries map[string]string, _ string) tree {
		return tree{"opt/bin/flanneld": copyOf(binaries["flannel"]+"/flanneld", 0o755)}
	},
	"kube-network-policies": func(binaries map[string]string, _ string) tree {
		// the publisher's /bin, which is a link
		return tree{"usr/bin/netpol": copyOf(binaries["kube-network-policies"]+"/netpol", 0o755)}
	},
	"pause": func(binaries map[string]string, _ string) tree {
		return tree{"pause": copyOf(binaries["pause"]+"/pause", 0o755)}
	},
	components.PodCheckpointer: func(binaries map[string]string, _ string) tree {
		return tree{"usr/local/bin/pod-checkpointer": copyOf(binaries[components.PodCheckpointer]+"/pod-checkpointer", 0o755)}
	},
}

func kubernetesLayer(component string) func(map[string]string, string) tree {
	return func(binaries map[string]string, _ string) tree {
		t := tree{"usr/local/bin/kubernetes": copyOf(binaries[component]+"/kubernetes", 0o755)}
		for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"} {
			t["usr/local/bin/"+name] = link("kubernetes")
		}
		return t
	}
}

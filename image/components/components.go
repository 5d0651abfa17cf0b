// Package components builds the programs that Garboard didn't write: Kubernetes, etcd, containerd, runc, the CNI
// plugins, CoreDNS, flannel, the enforcer of NetworkPolicies and pause. The pod-checkpointer is an exception: it is its
// own source, and only for development clusters with a self-hosted control plane.
//
// Each is a small Go module of its own below this directory, with a go.mod that pins the version and, where needed, a
// main of a few lines, or packages instead of those that a node never uses (see graft.go). Modules of their own because
// they disagree about their dependencies (containerd and Kubernetes about client-go, for one), and because a go.sum per
// component is a list of exactly what went into it. This package is the table of them and the one way to build them;
// nothing is downloaded but Go modules, which go.sum vouches for.
package components

import (
	"fmt"
	"slices"
)

// Component is something that is built from published sources.
type Component struct {
	Name     string
	Version  string
	Dir      string   // its module, below image/components
	Pins     string   // the directory with its go.mod and go.sum, if it isn't Dir
	Files    []string // the names that its result directory holds
	Optional bool     // built only on demand

	Programs []Program
	Fold     []string // packages main that become one program (see fold.go)
	Graft    []string // packages main of this repository that go into the first program (see graft.go)
	C        string   // a C file, for a component that isn't Go
}

// Program is one Go program of a component.
type Program struct {
	File    string   // in the result
	Package string   // "." is the component's own main
	Links   []string // names it answers to besides its own
	Tags    []string // build tags
	Stamp   []string // variables for the linker to set: path.Name=value
	Static  bool     // uses cgo, and is linked statically all the same
}

// Versions of the components. Kubernetes' programs all have the same one. Its other version is one from which clusters
// are upgraded, and its oldest version is the oldest that nodes run. The relinked one is for tests: the same code says
// that it is an earlier version. So it takes a link, and no compilation.
const (
	KubernetesVersion         = "v1.37.2"
	OtherKubernetesVersion    = "v1.36.3"
	OldestKubernetesVersion   = "v1.35.4"
	RelinkedKubernetesVersion = KubernetesVersion + "-relinked"
	EtcdVersion               = "v3.6.16"
	ContainerdVersion         = "v2.4.2"
	RuncVersion               = "v1.5.3"
	CNIVersion                = "v1.10.0"
	CoreDNSVersion            = "v1.15.0"
	FlannelVersion            = "v0.28.10"
	PoliciesVersion           = "v0.8.0"
	PauseVersion              = "3.10.1"
	PodCheckpointerVersion    = "v1"
)

// PodCheckpointer is an optional component: without it, no control plane can be self-hosted.
const PodCheckpointer = "pod-checkpointer"

// AptPackages are the Debian packages that building needs besides Go: a C compiler for runc and pause, and the library
// with which runc compiles seccomp filters (without it every pod with the profile RuntimeDefault fails), which
// pkg-config finds.
var AptPackages = []string{"gcc", "libc6-dev", "libseccomp-dev", "pkg-config"}

// All are the components, the longest build first: it is the one to see progress of, and the one to fail early.
var All = []Component{
	kubernetes(Component{Name: kubernetesName, Version: KubernetesVersion}),
	kubernetes(Component{Name: kubernetesName + "-1.36", Version: OtherKubernetesVersion, Pins: "kubernetes-1.36", Optional: true}),
	kubernetes(Component{Name: kubernetesName + "-1.35", Version: OldestKubernetesVersion, Pins: "kubernetes-1.35", Optional: true}),
	kubernetes(Component{Name: kubernetesName + "-relinked", Version: RelinkedKubernetesVersion, Optional: true}),
	{
		Name: "etcd", Version: EtcdVersion, Dir: "etcd",
		Files: []string{"etcd", "etcdctl", "etcdutl"},
		Programs: []Program{{
			File: "etcd", Package: ".", Links: []string{"etcdctl", "etcdutl"},
			Stamp: []string{"go.etcd.io/etcd/api/v3/version.GitSHA=" + EtcdVersion},
		}},
	},
	{
		Name: "containerd", Version: ContainerdVersion, Dir: "containerd",
		Files: []string{"containerd", "containerd-shim-runc-v2"},
		Programs: []Program{
			{File: "containerd", Package: "github.com/containerd/containerd/v2/cmd/containerd", Tags: containerdTags, Stamp: containerdStamp},
			{File: "containerd-shim-runc-v2", Package: "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", Tags: containerdTags, Stamp: containerdStamp},
		},
	},
	{
		Name: "runc", Version: RuncVersion, Dir: "runc",
		Files: []string{"runc", "sandbox"},
		// Both are libcontainer and little else: two programs would be 2.3 MB more to boot.
		Graft: []string{"services/front/sandbox/cmd/sandbox"},
		Programs: []Program{{
			File: "runc", Package: "github.com/opencontainers/runc", Links: []string{"sandbox"}, Static: true,
			Tags: []string{"netgo", "osusergo", "seccomp", "urfave_cli_no_docs"},
		}},
	},
	{
		Name: "cni", Version: CNIVersion, Dir: "cni",
		Files: []string{"cni", "bandwidth", "bridge", "firewall", "host-local", "loopback", "portmap", "ptp"},
		Fold: []string{
			cniPlugins + "/ipam/host-local", cniPlugins + "/main/bridge", cniPlugins + "/main/loopback", cniPlugins + "/main/ptp",
			cniPlugins + "/meta/bandwidth", cniPlugins + "/meta/firewall", cniPlugins + "/meta/portmap",
		},
		Programs: []Program{{
			File: "cni", Package: ".", Links: []string{"bandwidth", "bridge", "firewall", "host-local", "loopback", "portmap", "ptp"},
			Stamp: []string{"github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=" + CNIVersion},
		}},
	},
	{
		Name: "coredns", Version: CoreDNSVersion, Dir: "coredns",
		Files:    []string{"coredns"},
		Programs: []Program{{File: "coredns", Package: ".", Stamp: []string{"github.com/coredns/coredns/coremain.GitCommit=" + CoreDNSVersion}}},
	},
	{
		Name: "flannel", Version: FlannelVersion, Dir: "flannel",
		Files: []string{"flanneld"},
		Programs: []Program{{
			File: "flanneld", Package: "github.com/flannel-io/flannel", Stamp: []string{"github.com/flannel-io/flannel/pkg/version.Version=" + FlannelVersion},
		}},
	},
	{
		Name: policies, Version: PoliciesVersion, Dir: policies,
		Files:    []string{"netpol"},
		Programs: []Program{{File: "netpol", Package: "sigs.k8s.io/kube-network-policies/cmd"}},
	},
	{Name: "pause", Version: PauseVersion, Dir: "pause", Files: []string{"pause"}, C: "pause.c"},
	{
		Name: PodCheckpointer, Version: PodCheckpointerVersion, Dir: "podcheckpointer", Optional: true,
		Files:    []string{PodCheckpointer},
		Programs: []Program{{File: PodCheckpointer, Package: "."}},
	},
}

const (
	kubernetesName = "kubernetes"
	policies       = "kube-network-policies"
)

// kubernetes completes the component of a version. All versions have the same main.
func kubernetes(c Component) Component {
	links := []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"}
	c.Dir = kubernetesName
	c.Files = append([]string{kubernetesName}, links...)
	c.Programs = []Program{{File: kubernetesName, Package: ".", Stamp: kubernetesStamp(c.Version), Links: links}}
	return c
}

const cniPlugins = "github.com/containernetworking/plugins/plugins"

var (
	// containerdTags leave out the snapshotters that need tools or kernel parts that aren't on a node, and what costs
	// 0.9 MB to boot for nobody: an interpreter for plugins in WebAssembly, and the text of a manual.
	containerdTags  = []string{"no_btrfs", "no_zfs", "no_devmapper", "nri_no_wasm", "urfave_cli_no_docs"}
	containerdStamp = []string{"github.com/containerd/containerd/v2/version.Version=" + ContainerdVersion}
)

// kubernetesStamp is what "kubectl version" and each node's status show. Without it both call themselves v0.0.0-master,
// and version checks between the programs go wrong. A module has no Git commit; the build date is fixed so that builds
// are reproducible.
func kubernetesStamp(version string) []string {
	var major, minor, patch int
	if _, err := fmt.Sscanf(version, "v%d.%d.%d", &major, &minor, &patch); err != nil {
		panic(fmt.Sprintf("Kubernetes version %q: %v", version, err)) // a constant above is wrong
	}
	var stamp []string
	for _, path := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		stamp = append(stamp,
			path+".gitVersion="+version,
			fmt.Sprintf("%s.gitMajor=%d", path, major),
			fmt.Sprintf("%s.gitMinor=%d", path, minor),
			path+".gitCommit=unknown",
			path+".gitTreeState=archive",
			path+".buildDate=1970-01-01T00:00:00Z",
		)
	}
	return stamp
}

// Names lists the components that every cluster needs, in the order in which they are built, with these optional ones:
// further versions of Kubernetes, and names of others.
func Names(optional ...string) []string {
	var names []string
	for _, c := range All {
		if !c.Optional || slices.Contains(optional, c.Name) || c.Dir == kubernetesName && slices.Contains(optional, c.Version) {
			names = append(names, c.Name)
		}
	}
	return names
}

// Kubernetes lists the components with Kubernetes, the default version first.
func Kubernetes() []Component {
	return slices.DeleteFunc(slices.Clone(All), func(c Component) bool { return c.Dir != kubernetesName })
}

// KubernetesVersions lists the versions of Kubernetes that users can have built, the default one first.
func KubernetesVersions() []string {
	return []string{KubernetesVersion, OtherKubernetesVersion, OldestKubernetesVersion}
}

// ByName finds a component.
func ByName(name string) (Component, error) {
	var names []string
	for _, c := range All {
		if c.Name == name {
			return c, nil
		}
		names = append(names, c.Name)
	}
	return Component{}, fmt.Errorf("no component is called %q; there are: %v", name, names)
}

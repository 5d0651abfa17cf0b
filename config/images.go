package config

// Versions of what the default images hold. The image build pins the same
// versions in its components; a test there compares the two.
const (
	KubernetesVersion = "v1.36.3"
	EtcdVersion       = "3.6.8-0"
	PauseVersion      = "3.10.1"
	CoreDNSVersion    = "v1.14.7"
	FlannelVersion    = "v0.28.4"
)

// Default image references, named as their publishers name them.
const (
	DefaultAPIServerImage         = "registry.k8s.io/kube-apiserver:" + KubernetesVersion
	DefaultControllerManagerImage = "registry.k8s.io/kube-controller-manager:" + KubernetesVersion
	DefaultSchedulerImage         = "registry.k8s.io/kube-scheduler:" + KubernetesVersion
	DefaultProxyImage             = "registry.k8s.io/kube-proxy:" + KubernetesVersion
	DefaultKubeletImage           = "ghcr.io/garboard-os/kubelet:" + KubernetesVersion
	DefaultEtcdImage              = "registry.k8s.io/etcd:" + EtcdVersion
	DefaultPauseImage             = "registry.k8s.io/pause:" + PauseVersion
	DefaultCoreDNSImage           = "registry.k8s.io/coredns/coredns:" + CoreDNSVersion
	DefaultFlannelImage           = "ghcr.io/flannel-io/flannel:" + FlannelVersion
)

// DefaultImages lists every image that a node with a default configuration
// pulls, in the order in which it needs them.
func DefaultImages() []string {
	return []string{
		DefaultEtcdImage,
		DefaultKubeletImage,
		DefaultPauseImage,
		DefaultAPIServerImage,
		DefaultControllerManagerImage,
		DefaultSchedulerImage,
		DefaultProxyImage,
		DefaultFlannelImage,
		DefaultCoreDNSImage,
	}
}

package config

import (
	"fmt"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
)

// Versions of what the default images hold. The image build pins the same
// versions in its components; a test there compares the two.
const (
	KubernetesVersion = "v1.37.2"
	EtcdVersion       = "3.6.16-0"
	PauseVersion      = "3.10.1"
	CoreDNSVersion    = "v1.15.0"
	FlannelVersion    = "v0.28.10"
	PoliciesVersion   = "v0.8.0"
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
	DefaultPoliciesImage          = "registry.k8s.io/networking/kube-network-policies:" + PoliciesVersion
)

// images are the defaults of fields, by their paths.
var images = map[string]string{
	"machine.kubelet.image":             DefaultKubeletImage,
	"cluster.network.cni.flannel.image": DefaultFlannelImage,
	"cluster.network.policyAgent.image": DefaultPoliciesImage,
	"cluster.etcd.image":                DefaultEtcdImage,
	"cluster.apiServer.image":           DefaultAPIServerImage,
	"cluster.controllerManager.image":   DefaultControllerManagerImage,
	"cluster.scheduler.image":           DefaultSchedulerImage,
	"cluster.proxy.image":               DefaultProxyImage,
	"cluster.coreDNS.image":             DefaultCoreDNSImage,
}

// kubernetesVersion matches the versions that a node can run.
var kubernetesVersion = regexp.MustCompile(`^v1\.(35|36|37)\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// CheckKubernetesVersion refuses a version, such as v1.37.2, that this release doesn't run.
func CheckKubernetesVersion(version string) error {
	if !kubernetesVersion.MatchString(version) {
		return fmt.Errorf("version %s of Kubernetes isn't one that this release runs: v1.35 to v1.37, such as %s", quote(version), KubernetesVersion)
	}
	return nil
}

// VersionOf is the version that an image of Kubernetes has as its tag.
func VersionOf(image string) (string, error) {
	version := image[strings.LastIndexByte(image, ':')+1:]
	if strings.Contains(image, "@") || !semver.IsValid(version) {
		return "", fmt.Errorf("image %s has no version as its tag: change it by `gbctl patch mc`", image)
	}
	return version, nil
}

// WithVersion is an image of Kubernetes with another version as its tag.
func WithVersion(image, version string) (string, error) {
	if _, err := VersionOf(image); err != nil {
		return "", err
	}
	return image[:strings.LastIndexByte(image, ':')+1] + version, nil
}

// EveryImage is the prefix of a rule for all images.
const EveryImage = "*"

// Rule is the rule for an image; nil: none.
func (i Images) Rule(image string) (rule *ImageRule) {
	longest := -1
	for n, r := range i.Verify {
		prefix := spelled(r.Prefix)
		if r.Prefix == EveryImage {
			prefix = ""
		}
		if strings.HasPrefix(spelled(image), prefix) && len(prefix) > longest {
			rule, longest = &i.Verify[n], len(prefix)
		}
	}
	return rule
}

// spelled is the name of an image, or its beginning, with its registry in one spelling: another one mustn't lead past a
// rule.
func spelled(name string) string {
	host, path, more := strings.Cut(name, "/")
	if host = strings.TrimSuffix(strings.ToLower(host), ":443"); more {
		return host + "/" + path
	}
	return host
}

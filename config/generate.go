package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Options describe the configuration to generate. Endpoint is required, the
// rest may be zero.
type Options struct {
	ClusterName string
	// Endpoint is the URL of the Kubernetes API, such as https://10.5.0.2:6443.
	Endpoint string
	Type     MachineType // default Init
	Hostname string
	// InstallDisk is a device such as /dev/vda; none in containers.
	InstallDisk string
	// Mirrors are by registry host or "*": URLs in order of preference.
	Mirrors map[string][]string
	// CertSANs go into the certificates of a control plane's machine API and apiserver.
	CertSANs []string
	// KubernetesVersion is the version of the images, such as v1.37.2; default
	// KubernetesVersion.
	KubernetesVersion string
	// AllowScheduling lets pods run on control planes.
	AllowScheduling bool
	// Secrets are those of an existing cluster; default fresh ones.
	Secrets *Secrets
	// Now is the start of the validity of fresh secrets; default the present.
	Now time.Time
}

// Generate makes a complete configuration. Its images are written out, so that
// a node keeps its Kubernetes version when its operating system is upgraded.
// The other defaults are left to Load, so that the file stays short. Call
// FillDefaults to use the Config directly.
func Generate(o Options) (*Config, error) {
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	if o.Secrets == nil {
		secrets, err := NewSecrets(o.Now)
		if err != nil {
			return nil, fmt.Errorf("generate configuration: %w", err)
		}
		o.Secrets = secrets
	}
	o.Type = cmp.Or(o.Type, Init)
	kubernetes, err := kubernetesImages(o.KubernetesVersion)
	if err != nil {
		return nil, fmt.Errorf("generate configuration: %w", err)
	}
	endpoint, err := ParseURL(o.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("generate configuration: endpoint %q: %w", o.Endpoint, err)
	}
	c := &Config{Version: Version, Persist: new(true)}
	c.Machine.Type = o.Type
	c.Machine.Network.Hostname = o.Hostname
	c.Machine.Install.Disk = o.InstallDisk
	c.Machine.Kubelet.Image = kubernetes(DefaultKubeletImage)
	for host, endpoints := range o.Mirrors {
		var m Mirror
		for _, text := range endpoints {
			u, err := ParseURL(text)
			if err != nil {
				return nil, fmt.Errorf("generate configuration: mirror of %s: %q: %w", host, text, err)
			}
			m.Endpoints = append(m.Endpoints, u)
		}
		if c.Machine.Registries.Mirrors == nil {
			c.Machine.Registries.Mirrors = map[string]Mirror{}
		}
		c.Machine.Registries.Mirrors[host] = m
	}
	c.Cluster.Name = o.ClusterName
	c.Cluster.ControlPlane.Endpoint = endpoint
	if o.Type.ControlPlane() {
		generateControlPlane(c, o, kubernetes)
	}
	o.Secrets.fill(c)
	if err := c.loads(); err != nil {
		return nil, err
	}
	return c, nil
}

func generateControlPlane(c *Config, o Options, kubernetes func(string) string) {
	c.Machine.CertSANs = o.CertSANs
	c.Cluster.APIServer.CertSANs = o.CertSANs
	c.Cluster.AllowSchedulingOnControlPlanes = o.AllowScheduling
	c.Cluster.Etcd.Image = DefaultEtcdImage
	c.Cluster.APIServer.Image = kubernetes(DefaultAPIServerImage)
	c.Cluster.ControllerManager.Image = kubernetes(DefaultControllerManagerImage)
	c.Cluster.Scheduler.Image = kubernetes(DefaultSchedulerImage)
	c.Cluster.Proxy.Image = kubernetes(DefaultProxyImage)
	c.Cluster.CoreDNS.Image = DefaultCoreDNSImage
	c.Cluster.Network.CNI.Flannel.Image = DefaultFlannelImage
}

// fullVersion is a version of Kubernetes as it is in the names of images.
func fullVersion(version string) (string, error) {
	version = cmp.Or(version, KubernetesVersion)
	if !strings.HasPrefix(version, "v") {
		version = "v" + version
	}
	return version, CheckKubernetesVersion(version)
}

// kubernetesImages puts a version into the default images of Kubernetes.
func kubernetesImages(version string) (func(image string) string, error) {
	version, err := fullVersion(version)
	return func(image string) string { return strings.TrimSuffix(image, KubernetesVersion) + version }, err
}

// ParseEndpoint reads the address of the Kubernetes API as users write it: a
// host, host and port, or the whole URL. completed reports that something was
// added to it.
func ParseEndpoint(text string) (endpoint URL, completed bool, err error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		scheme, rest = "https", text
	}
	host, port := strings.TrimSuffix(rest, "/"), ""
	if addr, err := netip.ParseAddr(host); err == nil && addr.Is6() {
		host = "[" + host + "]"
	}
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		host, port = host[:i], host[i+1:]
	}
	switch n, err := strconv.Atoi(cmp.Or(port, strconv.Itoa(DefaultAPIServerPort))); {
	case scheme != "https":
		return URL{}, false, fmt.Errorf("endpoint %s: must be https, not %s", quote(text), quote(scheme))
	case host == "" || strings.ContainsAny(host, "/?#@ "):
		return URL{}, false, fmt.Errorf("endpoint %s: must be a host, host:port or https://host:port", quote(text))
	case err != nil || n < 1 || n > maxPort:
		return URL{}, false, fmt.Errorf("endpoint %s: %s is not a port", quote(text), quote(port))
	default:
		port = strconv.Itoa(n)
	}
	endpoint, err = ParseURL("https://" + net.JoinHostPort(strings.Trim(host, "[]"), port))
	if err != nil {
		return URL{}, false, fmt.Errorf("endpoint %s: %w", quote(text), err)
	}
	if endpoint.Hostname() == "" {
		return URL{}, false, errors.New("endpoint: no host")
	}
	return endpoint, endpoint.String() != strings.TrimSuffix(text, "/"), nil
}

// loads returns the error of Load for c as a document: if it is nil, a node
// accepts c.
func (c *Config) loads() error {
	data, err := c.Encode()
	if err != nil {
		return err
	}
	_, _, err = Load("generated configuration", data)
	return err
}

// DefaultImages lists every image that a node with a default configuration
// pulls, in the order in which it needs them.
func DefaultImages() []string { return (&Config{}).Images() }

// Images lists every image that nodes with this configuration pull, in the order in which they need them. Those of the
// pods that run on workers are in the configuration of control planes.
func (c *Config) Images() (all []string) {
	k, control := &c.Cluster, c.Machine.Type != Worker
	for _, i := range []struct {
		pulled       bool
		image, usual string
	}{
		{control, k.Etcd.Image, DefaultEtcdImage},
		{true, c.Machine.Kubelet.Image, DefaultKubeletImage},
		{true, DefaultPauseImage, ""},
		{control, k.APIServer.Image, DefaultAPIServerImage},
		{control, k.ControllerManager.Image, DefaultControllerManagerImage},
		{control, k.Scheduler.Image, DefaultSchedulerImage},
		{control && !k.Proxy.Disabled, k.Proxy.Image, DefaultProxyImage},
		{control && cmp.Or(k.Network.CNI.Name, CNIFlannel) == CNIFlannel, k.Network.CNI.Flannel.Image, DefaultFlannelImage},
		{control && k.Network.Policies, k.Network.PolicyAgent.Image, DefaultPoliciesImage},
		{control && !k.CoreDNS.Disabled, k.CoreDNS.Image, DefaultCoreDNSImage},
		{c.Machine.Install.Image != "", c.Machine.Install.Image, ""},
	} {
		if i.pulled {
			all = append(all, cmp.Or(i.image, i.usual))
		}
	}
	return all
}

// KubernetesImages lists the images that a change of nodes with this configuration to a version of Kubernetes pulls:
// those that they have, with that version. Workers also pull kube-proxy, which is in the configuration of control
// planes.
func (c *Config) KubernetesImages(version string) (all []string, err error) {
	version, err = fullVersion(version)
	if err != nil {
		return nil, err
	}
	images := []string{cmp.Or(c.Machine.Kubelet.Image, DefaultKubeletImage)}
	if c.Machine.Type != Worker {
		images = append([]string{
			cmp.Or(c.Cluster.APIServer.Image, DefaultAPIServerImage),
			cmp.Or(c.Cluster.ControllerManager.Image, DefaultControllerManagerImage),
			cmp.Or(c.Cluster.Scheduler.Image, DefaultSchedulerImage),
			cmp.Or(c.Cluster.Proxy.Image, DefaultProxyImage),
		}, images...)
	}
	for _, image := range images {
		image, err := WithVersion(image, version)
		if err != nil {
			return nil, err
		}
		all = append(all, image)
	}
	return all, nil
}

package config

import "net/netip"

// Cluster is what all nodes of a cluster agree about.
type Cluster struct {
	Name   string `yaml:"clusterName"` // default "garboard"
	ID     string `yaml:"id"`          // base64 of 32 bytes; tells clusters apart
	Secret Secret `yaml:"secret"`      // base64 of 32 bytes; known to members only
	// Token is the Kubernetes bootstrap token of joining kubelets, such as
	// q9pyzr.0123456789abcdef. Required.
	Token        Secret          `yaml:"token"`
	ControlPlane ControlPlaneSet `yaml:"controlPlane"`
	Network      ClusterNetwork  `yaml:"network"`

	CA             CertKey        `yaml:"ca"`           // Kubernetes CA; workers hold only crt
	AggregatorCA   CertKey        `yaml:"aggregatorCA"` // control planes: CN front-proxy
	ServiceAccount ServiceAccount `yaml:"serviceAccount"`

	Etcd              Etcd              `yaml:"etcd"`
	APIServer         APIServer         `yaml:"apiServer"`
	ControllerManager ControllerManager `yaml:"controllerManager"`
	Scheduler         Scheduler         `yaml:"scheduler"`
	Proxy             Proxy             `yaml:"proxy"`
	CoreDNS           CoreDNS           `yaml:"coreDNS"`

	// AllowSchedulingOnControlPlanes leaves control planes without their taint,
	// so that a cluster of one node runs pods. Default false.
	AllowSchedulingOnControlPlanes bool             `yaml:"allowSchedulingOnControlPlanes"`
	ExtraManifests                 []URL            `yaml:"extraManifests"` // http or https; applied at bootstrap
	InlineManifests                []InlineManifest `yaml:"inlineManifests" key:"name"`
}

// ControlPlaneSet is how the control plane is reached.
type ControlPlaneSet struct {
	// Endpoint is the URL of the Kubernetes API, with its port, such as
	// https://cluster.example.org:6443. Required.
	Endpoint URL `yaml:"endpoint"`
	// LocalAPIServerPort is the port of the apiserver on each control plane.
	// Default 6443.
	LocalAPIServerPort int `yaml:"localAPIServerPort"`
}

// ClusterNetwork is the addresses of pods and services.
type ClusterNetwork struct {
	CNI            CNI            `yaml:"cni"`
	DNSDomain      string         `yaml:"dnsDomain"`      // default cluster.local
	PodSubnets     []netip.Prefix `yaml:"podSubnets"`     // default 10.244.0.0/16
	ServiceSubnets []netip.Prefix `yaml:"serviceSubnets"` // default 10.96.0.0/12
}

// CNIName is who connects the pods.
type CNIName string

const (
	CNIFlannel CNIName = "flannel" // VXLAN, applied at bootstrap
	CNINone    CNIName = "none"    // the user installs one
	CNICustom  CNIName = "custom"  // manifests from urls
)

// CNI is the choice of pod network.
type CNI struct {
	Name    CNIName `yaml:"name"` // default flannel
	URLs    []URL   `yaml:"urls"` // for custom
	Flannel Flannel `yaml:"flannel"`
}

// Flannel is flannel's settings.
type Flannel struct {
	Image string `yaml:"image"` // default DefaultFlannelImage
}

// ServiceAccount holds the key that signs service account tokens.
type ServiceAccount struct {
	Key KeyPEM `yaml:"key"` // base64 PEM, RSA or ECDSA; control planes: required
}

// Etcd is etcd.
type Etcd struct {
	Image     string            `yaml:"image"`     // default DefaultEtcdImage
	CA        CertKey           `yaml:"ca"`        // control planes: required
	ExtraArgs map[string]string `yaml:"extraArgs"` // flag without dashes: value
}

// APIServer is kube-apiserver.
type APIServer struct {
	Image        string            `yaml:"image"`                        // default DefaultAPIServerImage
	ExtraArgs    map[string]string `yaml:"extraArgs"`                    // flag without dashes: value
	ExtraVolumes []Volume          `yaml:"extraVolumes" key:"mountPath"` // what its pod sees of the node
	CertSANs     []string          `yaml:"certSANs"`                     // further names and addresses in its certificate
}

// ControllerManager is kube-controller-manager.
type ControllerManager struct {
	Image        string            `yaml:"image"`                        // default DefaultControllerManagerImage
	ExtraArgs    map[string]string `yaml:"extraArgs"`                    // flag without dashes: value
	ExtraVolumes []Volume          `yaml:"extraVolumes" key:"mountPath"` // what its pod sees of the node
}

// Scheduler is kube-scheduler.
type Scheduler struct {
	Image        string            `yaml:"image"`                        // default DefaultSchedulerImage
	ExtraArgs    map[string]string `yaml:"extraArgs"`                    // flag without dashes: value
	ExtraVolumes []Volume          `yaml:"extraVolumes" key:"mountPath"` // what its pod sees of the node
}

// ProxyMode is how kube-proxy programs the kernel.
type ProxyMode string

const (
	ProxyNFTables ProxyMode = "nftables"
	ProxyIPTables ProxyMode = "iptables"
	ProxyIPVS     ProxyMode = "ipvs"
)

// Proxy is kube-proxy.
type Proxy struct {
	Image     string            `yaml:"image"`     // default DefaultProxyImage
	Mode      ProxyMode         `yaml:"mode"`      // default nftables
	Disabled  bool              `yaml:"disabled"`  // for a CNI that replaces it
	ExtraArgs map[string]string `yaml:"extraArgs"` // flag without dashes: value
}

// CoreDNS is the cluster's DNS.
type CoreDNS struct {
	Image    string `yaml:"image"`    // default DefaultCoreDNSImage
	Disabled bool   `yaml:"disabled"` // the user brings another
}

// Volume is a directory or file of the node in a container.
type Volume struct {
	HostPath  string `yaml:"hostPath"`  // required, absolute
	MountPath string `yaml:"mountPath"` // required, absolute
	ReadOnly  bool   `yaml:"readonly"`  // the container can't write there
}

// InlineManifest is Kubernetes objects applied once at bootstrap.
type InlineManifest struct {
	Name     string `yaml:"name"`     // required, unique
	Contents string `yaml:"contents"` // required, one or more YAML documents
}

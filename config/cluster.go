package config

import "net/netip"

// Cluster has the settings that are the same on all nodes of a cluster.
type Cluster struct {
	Name string `yaml:"clusterName"` // default "garboard"
	ID   string `yaml:"id"`          // accepted, because configurations of earlier releases have it
	// base64 of 32 bytes; known to control planes only: Secrets in etcd are encrypted with it
	Secret Secret `yaml:"secret"`
	// AcceptedSecrets are further ones, with which Secrets in etcd can be read that were encrypted with them.
	AcceptedSecrets []Secret `yaml:"acceptedSecrets"`
	// Token is the Kubernetes bootstrap token of joining kubelets, such as
	// q9pyzr.0123456789abcdef. Required. Control planes make it once, without an end; gbctl token
	// ends it, and makes others.
	Token        Secret          `yaml:"token"`
	ControlPlane ControlPlaneSet `yaml:"controlPlane"`
	Network      ClusterNetwork  `yaml:"network"`

	// Kubernetes CA; workers hold only crt
	CA CertKey `yaml:"ca"`
	// further authorities that are accepted, as in machine.acceptedCAs
	AcceptedCAs  []CertKey `yaml:"acceptedCAs" key:"crt"`
	AggregatorCA CertKey   `yaml:"aggregatorCA"` // control planes: CN front-proxy
	// further ones that are accepted, as in machine.acceptedCAs
	AcceptedAggregatorCAs []CertKey      `yaml:"acceptedAggregatorCAs" key:"crt"`
	ServiceAccount        ServiceAccount `yaml:"serviceAccount"`

	Etcd              Etcd              `yaml:"etcd"`
	APIServer         APIServer         `yaml:"apiServer"`
	ControllerManager ControllerManager `yaml:"controllerManager"`
	Scheduler         Scheduler         `yaml:"scheduler"`
	Proxy             Proxy             `yaml:"proxy"`
	CoreDNS           CoreDNS           `yaml:"coreDNS"`

	// AllowSchedulingOnControlPlanes removes the taint from control planes, so that pods
	// can run in a cluster of one node. Default false.
	AllowSchedulingOnControlPlanes bool `yaml:"allowSchedulingOnControlPlanes"`
	// ExtraManifests are http or https, 32 MiB each at most: docs/manifests.md. #sha256=… at the end of a URL
	// is the SHA-256 that its document must have. No redirect from https to http is followed.
	ExtraManifests  []URL            `yaml:"extraManifests"`
	InlineManifests []InlineManifest `yaml:"inlineManifests" key:"name"`
}

// ControlPlaneSet has the addresses of the control plane.
type ControlPlaneSet struct {
	// Endpoint is the URL of the Kubernetes API, with its port, such as
	// https://cluster.example.org:6443. Required.
	Endpoint URL `yaml:"endpoint"`
	// LocalAPIServerPort is the port of the apiserver on each control plane.
	// Default 6443.
	LocalAPIServerPort int `yaml:"localAPIServerPort"`
}

// ClusterNetwork has the networks of pods and services.
type ClusterNetwork struct {
	CNI CNI `yaml:"cni"`
	// Policies makes nodes enforce NetworkPolicies. It needs flannel, and kernels with nft_queue,
	// as those of Garboard's machines. Default false.
	Policies       bool           `yaml:"policies"`
	PolicyAgent    PolicyAgent    `yaml:"policyAgent"`
	DNSDomain      string         `yaml:"dnsDomain"`      // default cluster.local
	PodSubnets     []netip.Prefix `yaml:"podSubnets"`     // default 10.244.0.0/16
	ServiceSubnets []netip.Prefix `yaml:"serviceSubnets"` // default 10.96.0.0/12
}

// CNIName is the pod network.
type CNIName string

const (
	CNIFlannel CNIName = "flannel" // VXLAN, applied at bootstrap
	CNINone    CNIName = "none"    // none; the user installs one
	CNICustom  CNIName = "custom"  // manifests from urls
)

// CNI is the choice of pod network.
type CNI struct {
	Name    CNIName `yaml:"name"` // default flannel
	URLs    []URL   `yaml:"urls"` // for custom; as cluster.extraManifests
	Flannel Flannel `yaml:"flannel"`
}

// Flannel has the settings of flannel.
type Flannel struct {
	Image string `yaml:"image"` // default DefaultFlannelImage
}

// PolicyAgent has the settings of kube-network-policies, which enforces NetworkPolicies.
type PolicyAgent struct {
	Image string `yaml:"image"` // default DefaultPoliciesImage
}

// ServiceAccount holds the key that signs service account tokens.
type ServiceAccount struct {
	Key KeyPEM `yaml:"key"` // base64 PEM, RSA or ECDSA; control planes: required
	// AcceptedKeys are further keys whose tokens are accepted, private or public ones.
	AcceptedKeys []KeyPEM `yaml:"acceptedKeys"`
}

// Etcd has the settings of etcd.
type Etcd struct {
	Image string  `yaml:"image"` // default DefaultEtcdImage
	CA    CertKey `yaml:"ca"`    // control planes: required
	// further authorities that are accepted, as in machine.acceptedCAs
	AcceptedCAs []CertKey `yaml:"acceptedCAs" key:"crt"`
	ExtraArgs   Args      `yaml:"extraArgs"` // flag without dashes: value
}

// APIServer has the settings of kube-apiserver.
type APIServer struct {
	Image string `yaml:"image"` // default DefaultAPIServerImage
	// flag without dashes: value, or a list of values; see access.md
	ExtraArgs    Args     `yaml:"extraArgs"`
	ExtraVolumes []Volume `yaml:"extraVolumes" key:"mountPath"` // files and directories of the node in its pod
	CertSANs     []string `yaml:"certSANs"`                     // additional names and addresses in its certificate
	// AuditPolicy selects what the API server logs in /var/log/audit/kube: a Policy of
	// audit.k8s.io/v1. Default: who changed which object and who ran commands in pods, never
	// the content of objects; nothing of reads, leases and events.
	AuditPolicy Object `yaml:"auditPolicy"`
	// AdmissionControl are configurations of admission plugins. One for PodSecurity replaces
	// the default, which enforces the level baseline everywhere but in kube-system. A plugin
	// that Kubernetes doesn't enable by itself is also needed in
	// extraArgs.enable-admission-plugins, beside NodeRestriction.
	AdmissionControl []AdmissionPlugin `yaml:"admissionControl" key:"name"`
}

// AdmissionPlugin has the configuration of an admission plugin of the API server.
type AdmissionPlugin struct {
	Name          string `yaml:"name"`          // required, such as PodSecurity
	Configuration Object `yaml:"configuration"` // required; its apiVersion, kind and fields are those of the plugin
}

// ControllerManager has the settings of kube-controller-manager.
type ControllerManager struct {
	Image        string   `yaml:"image"`                        // default DefaultControllerManagerImage
	ExtraArgs    Args     `yaml:"extraArgs"`                    // flag without dashes: value, or a list of values
	ExtraVolumes []Volume `yaml:"extraVolumes" key:"mountPath"` // files and directories of the node in its pod
}

// Scheduler has the settings of kube-scheduler.
type Scheduler struct {
	Image        string   `yaml:"image"`                        // default DefaultSchedulerImage
	ExtraArgs    Args     `yaml:"extraArgs"`                    // flag without dashes: value, or a list of values
	ExtraVolumes []Volume `yaml:"extraVolumes" key:"mountPath"` // files and directories of the node in its pod
}

// ProxyMode is the kernel mechanism of kube-proxy.
type ProxyMode string

const (
	ProxyNFTables ProxyMode = "nftables"
	ProxyIPTables ProxyMode = "iptables"
	ProxyIPVS     ProxyMode = "ipvs"
)

// Proxy has the settings of kube-proxy.
type Proxy struct {
	Image     string    `yaml:"image"`     // default DefaultProxyImage
	Mode      ProxyMode `yaml:"mode"`      // default nftables
	Disabled  bool      `yaml:"disabled"`  // for a CNI that replaces it
	ExtraArgs Args      `yaml:"extraArgs"` // flag without dashes: value
}

// CoreDNS has the settings of the cluster DNS.
type CoreDNS struct {
	Image    string `yaml:"image"`    // default DefaultCoreDNSImage
	Disabled bool   `yaml:"disabled"` // for another DNS server, which the user installs
}

// Volume is a directory or file of the node in a container.
type Volume struct {
	// required, absolute; the user of the program must be able to read it: see hardening.md
	HostPath  string `yaml:"hostPath"`
	MountPath string `yaml:"mountPath"` // required, absolute
	ReadOnly  bool   `yaml:"readonly"`  // the container can't write to it
}

// InlineManifest has Kubernetes objects that are made once: docs/manifests.md.
type InlineManifest struct {
	Name     string `yaml:"name"`     // required, unique
	Contents string `yaml:"contents"` // required, one or more YAML documents
}

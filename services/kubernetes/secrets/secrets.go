// Package secrets makes the keys and certificates of a control plane node, from
// the authorities that the configuration holds. A worker doesn't hold their keys,
// and gets the one certificate that it needs from trustd on a control plane.
//
// What is signed by a CA that the node knows isn't kept on disk: every boot issues it
// anew, into resources and from there into /system/secrets, a tmpfs. What a worker got
// from trustd is kept on STATE, or its API would be closed after a boot for as long as
// no control plane answers.
// What is still right is kept: a certificate is replaced when its authority
// or subject changed, when a name or address is missing in it, or when it nears
// its end.
//
//	configuration, addresses ─→ APIController        ─→ APISecrets   (on workers through trustd, and STATE)
//	                         ─→ EtcdController       ─→ EtcdSecrets
//	                         ─→ KubernetesController ─→ KubernetesSecrets, KubeletSecrets
//	all but APISecrets       ─→ FilesController      ─→ files, SecretsStatuses (content hash)
//
// A certificate is replaced under the same name, and whoever uses it reads it
// again; only what programs read once, at their start, changes the hash.
package secrets

import (
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
)

// IDs of the one object of each kind.
const (
	EtcdID       = "etcd"
	KubernetesID = "kubernetes"
	KubeletID    = "kubelet"
	APIID        = "api"
)

// namespace holds what must not be shown to readers of the API.
const namespace = "secrets"

// EtcdSpec is what etcd and its clients on this node need. PEM.
type EtcdSpec struct {
	CA         config.PEM    `yaml:"ca"`
	ServerCert config.PEM    `yaml:"serverCert"` // for clients of this member
	ServerKey  config.KeyPEM `yaml:"serverKey"`
	PeerCert   config.PEM    `yaml:"peerCert"` // among members
	PeerKey    config.KeyPEM `yaml:"peerKey"`
	ClientCert config.PEM    `yaml:"clientCert"` // of Garboard itself
	ClientKey  config.KeyPEM `yaml:"clientKey"`
}

// Etcd is the secrets of etcd, on control planes.
var Etcd = resource.Define[EtcdSpec](resource.Definition{
	Type: "EtcdSecrets.secrets.garboard.dev", Kind: "EtcdSecret", Namespace: namespace,
})

// KubernetesSpec is what the control plane's programs need. PEM.
type KubernetesSpec struct {
	CA             config.CertKey `yaml:"ca"`             // of the cluster; signs kubelets' certificates too
	APIServer      config.CertKey `yaml:"apiServer"`      // serving
	KubeletClient  config.CertKey `yaml:"kubeletClient"`  // apiserver → kubelets
	EtcdCA         config.PEM     `yaml:"etcdCA"`         // what etcd's certificates are signed by
	EtcdClient     config.CertKey `yaml:"etcdClient"`     // apiserver → etcd
	AggregatorCA   config.PEM     `yaml:"aggregatorCA"`   // what aggregated API servers trust
	FrontProxy     config.CertKey `yaml:"frontProxy"`     // apiserver → aggregated API servers
	ServiceAccount config.CertKey `yaml:"serviceAccount"` // public key, private key

	Admin             config.CertKey `yaml:"admin"` // system:masters
	ControllerManager config.CertKey `yaml:"controllerManager"`
	Scheduler         config.CertKey `yaml:"scheduler"`

	// EncryptionKey encrypts Secrets in etcd: 32 bytes, or none.
	EncryptionKey config.KeyPEM `yaml:"encryptionKey"`
	Endpoint      string        `yaml:"endpoint"`      // URL of the cluster's API
	LocalEndpoint string        `yaml:"localEndpoint"` // URL of this node's apiserver
	// Balancer is the URL at which the node's own clients reach an apiserver that is
	// ready, with balancer.ServerName in its certificate.
	Balancer string `yaml:"balancer"`
}

// Kubernetes is the secrets of the control plane, on control planes.
var Kubernetes = resource.Define[KubernetesSpec](resource.Definition{
	Type: "KubernetesSecrets.secrets.garboard.dev", Kind: "KubernetesSecret", Namespace: namespace,
})

// KubeletSpec is what the kubelet trusts, and on control planes its own
// certificates: the one that it serves with, so that the node itself can check
// whom it asks about static pods, and its first one as a client. The latter is
// what the bootstrap token would get it, minutes later where its tries back off
// while the API server that they need is only starting beside it. Workers don't
// hold the CA's key: their kubelets ask the cluster for both, the first with the token.
type KubeletSpec struct {
	CA      config.PEM     `yaml:"ca"` // of the cluster: who may ask the kubelet
	Serving config.CertKey `yaml:"serving"`
	Client  config.CertKey `yaml:"client"`
}

// Kubelet is the secrets of the kubelet, on every node.
var Kubelet = resource.Define[KubeletSpec](resource.Definition{
	Type: "KubeletSecrets.secrets.garboard.dev", Kind: "KubeletSecret", Namespace: namespace,
})

// StatusSpec says that the files are written.
type StatusSpec struct {
	// Version is a hash of content: it changes when and only when a program must be
	// started anew to see what changed. Renewed certificates don't count.
	Version string `yaml:"version"`
}

// Statuses is the state of the secret files of the control plane, of etcd and of
// the kubelet: one for each, by the ID of its secrets.
var Statuses = resource.Define[StatusSpec](resource.Definition{
	Type: "SecretsStatuses.secrets.garboard.dev", Kind: "SecretsStatus", Namespace: "controlplane",
	Columns: []resource.Column{{Name: "CONTENT", Value: func(spec any) string { return spec.(StatusSpec).Version }}},
})

// Options are what the controllers stand on; the zero value is a node's.
type Options struct {
	Dir string           // where files go; "": boot.SecretsDir
	Now func() time.Time // nil: time.Now
	// APIFile keeps a worker's certificate of the machine API, with its key; "": on STATE.
	APIFile string
	// Balancer is where the node's own clients reach the Kubernetes API; "": balancer.URL.
	Balancer string
	// Dial connects from a local address; nil: the network does.
	Dial func(ctx context.Context, from netip.Addr, address string) (net.Conn, error)
}

// Controllers are the controllers of this package.
func Controllers(o Options) []resource.Controller {
	if o.Dir == "" {
		o.Dir = boot.SecretsDir
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	stored := certFile{path: o.APIFile, ready: func() bool { return true }}
	if o.APIFile == "" {
		stored = certFile{path: filepath.Join(boot.StateDir, apiFile), ready: func() bool { return boot.IsMountPoint(boot.StateDir) }}
	}
	if o.Balancer == "" {
		o.Balancer = balancer.URL
	}
	if o.Dial == nil {
		o.Dial = dial
	}
	return []resource.Controller{
		{
			Name: "secrets.APIController", Reconcile: (&APIController{now: o.Now, stored: stored, signingClient: signingClient{dial: o.Dial}}).Reconcile,
			Inputs:  append(nodeInputs(), resource.Input{Type: balancer.APIServers.Type()}),
			Outputs: []string{API.Type()},
		},
		{
			Name: "secrets.EtcdController", Reconcile: (&EtcdController{now: o.Now}).Reconcile,
			Inputs:  nodeInputs(),
			Outputs: []string{Etcd.Type()},
		},
		{
			Name: "secrets.KubernetesController", Reconcile: (&KubernetesController{now: o.Now, balancer: o.Balancer}).Reconcile,
			Inputs:  nodeInputs(),
			Outputs: []string{Kubernetes.Type(), Kubelet.Type()},
		},
		{
			Name: "secrets.FilesController", Reconcile: (&FilesController{dir: o.Dir}).Reconcile,
			Inputs:  []resource.Input{{Type: Kubernetes.Type(), ID: KubernetesID}, {Type: Etcd.Type(), ID: EtcdID}, {Type: Kubelet.Type(), ID: KubeletID}},
			Outputs: []string{Statuses.Type()},
		},
	}
}

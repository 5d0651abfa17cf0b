// Package secrets makes the keys and certificates of a control plane node, from
// the authorities in the configuration. A worker doesn't have their keys, and
// gets the one certificate that it needs from trustd on a control plane.
//
// Certificates of a CA whose key the node has aren't stored on disk: every boot
// issues them again, into resources and from there into /system/secrets, a
// tmpfs. A worker stores its certificate from trustd on STATE: otherwise its
// API would be closed after a boot until a control plane answers. A certificate
// is kept while it is valid. It is replaced when its authority or subject has
// changed, when a name or address is missing in it, or near its end.
//
//	configuration, addresses ─→ APIController        ─→ APISecrets   (on workers through trustd, and STATE)
//	                         ─→ EtcdController       ─→ EtcdSecrets
//	                         ─→ KubernetesController ─→ KubernetesSecrets, KubeletSecrets
//	all but APISecrets       ─→ FilesController      ─→ files, SecretsStatuses (content hash)
//
// A certificate is replaced under the same name, and programs read it again;
// only files that programs read once, at their start, change the hash.
package secrets

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// IDs of the one object of each kind.
const (
	EtcdID       = "etcd"
	KubernetesID = "kubernetes"
	KubeletID    = "kubelet"
	APIID        = "api"
)

// namespace is for resources that must not be shown to readers of the API.
const namespace = "secrets"

// EtcdSpec is the secrets for etcd and its clients on this node. PEM.
type EtcdSpec struct {
	CA     config.PEM     `yaml:"ca"`     // all that are accepted
	Server config.CertKey `yaml:"server"` // for clients of this member
	Peer   config.CertKey `yaml:"peer"`   // among members
	Client config.CertKey `yaml:"client"` // of Garboard itself

	Authorities map[string]string `yaml:"authorities,omitempty"` // see StatusSpec
}

// Etcd is the secrets of etcd, on control planes.
var Etcd = resource.Define[EtcdSpec](resource.Definition{
	Type: "EtcdSecrets.secrets.garboard.dev", Kind: "EtcdSecret", Namespace: namespace,
})

// IssuersID is the ID of the one object of Issuers.
const IssuersID = "service-accounts"

// Issuers are the endpoints of the control plane, as all control planes have recorded them in etcd, the newest first.
// Tokens of service accounts have them as issuers, and servers of control planes keep their names. Package controlplane
// publishes them.
var Issuers = resource.Define[[]string](resource.Definition{
	Type: "ServiceAccountIssuers.kubernetes.garboard.dev", Kind: "ServiceAccountIssuer", Namespace: "controlplane",
})

// KubernetesSpec is the secrets for the control plane's programs. PEM.
type KubernetesSpec struct {
	CA             config.CertKey `yaml:"ca"`             // of the cluster; signs kubelets' certificates too
	Trusted        config.PEM     `yaml:"trusted"`        // it, and further ones that are accepted
	APIServer      config.CertKey `yaml:"apiServer"`      // serving
	KubeletClient  config.CertKey `yaml:"kubeletClient"`  // apiserver → kubelets
	EtcdCA         config.PEM     `yaml:"etcdCA"`         // the authorities of etcd's certificates
	EtcdClient     config.CertKey `yaml:"etcdClient"`     // apiserver → etcd
	AggregatorCA   config.PEM     `yaml:"aggregatorCA"`   // the authorities that aggregated API servers trust
	FrontProxy     config.CertKey `yaml:"frontProxy"`     // apiserver → aggregated API servers
	ServiceAccount config.CertKey `yaml:"serviceAccount"` // public keys, private key

	Admin             config.CertKey `yaml:"admin"` // system:masters
	ControllerManager config.CertKey `yaml:"controllerManager"`
	Scheduler         config.CertKey `yaml:"scheduler"`

	// EncryptionKeys are of 32 bytes each. Secrets in etcd are written with the first one.
	EncryptionKeys []config.KeyPEM `yaml:"encryptionKeys"`
	Endpoint       string          `yaml:"endpoint"`      // URL of the cluster's API
	LocalEndpoint  string          `yaml:"localEndpoint"` // URL of this node's apiserver
	// Balancer is the URL at which the node's own clients reach a ready apiserver,
	// with balancer.ServerName in its certificate.
	Balancer string `yaml:"balancer"`

	Authorities map[string]string `yaml:"authorities,omitempty"` // see StatusSpec
}

// Administrator are the options of a client with all rights of the API server at a URL, whose certificate has a name;
// "": that in the URL.
func (s KubernetesSpec) Administrator(url, name string) kubeclient.Options {
	return kubeclient.Options{Server: url, ServerName: name, CA: s.Trusted, Cert: s.Admin.Crt, Key: s.Admin.Key}
}

// Kubernetes is the secrets of the control plane, on control planes.
var Kubernetes = resource.Define[KubernetesSpec](resource.Definition{
	Type: "KubernetesSecrets.secrets.garboard.dev", Kind: "KubernetesSecret", Namespace: namespace,
})

// KubeletSpec is the authority that the kubelet trusts, and on control planes its
// own certificates: its serving certificate, with which the node verifies the
// kubelet when it asks about static pods, and its first client certificate. The
// bootstrap token would get it the latter too, but minutes later if its attempts
// back off while the API server is only starting. Workers don't have the CA's key:
// their kubelets request both from the cluster, the first one with the token.
type KubeletSpec struct {
	CA      config.PEM     `yaml:"ca"`      // of the cluster: of clients that the kubelet accepts
	Issuing config.PEM     `yaml:"issuing"` // the one of them that signs new certificates
	Serving config.CertKey `yaml:"serving"`
	Client  config.CertKey `yaml:"client"`

	Authorities map[string]string `yaml:"authorities,omitempty"` // see StatusSpec
}

// Kubelet is the secrets of the kubelet, on every node.
var Kubelet = resource.Define[KubeletSpec](resource.Definition{
	Type: "KubeletSecrets.secrets.garboard.dev", Kind: "KubeletSecret", Namespace: namespace,
})

// StatusSpec reports that the files are written.
type StatusSpec struct {
	// Version is a hash of content: it changes only when a program must be
	// restarted to use the new content. Renewed certificates don't count.
	Version string `yaml:"version" column:"CONTENT"`
	// Programs are the same for each program of the control plane.
	Programs map[string]string `yaml:"programs,omitempty"`
	// Authorities are what the files are made of: config.Config.Digests.
	Authorities map[string]string `yaml:"authorities,omitempty"`
}

// Current reports whether the files are those of a configuration.
func (s StatusSpec) Current(c *config.Config) bool {
	now, err := c.Digests()
	if err != nil {
		return false
	}
	for name, digest := range s.Authorities {
		if now[name] != digest {
			return false
		}
	}
	return true
}

// Await waits until the files with an ID are those of the present configuration.
func Await(ctx context.Context, s *resource.Store, id string) error {
	c, err := configuration.Config(s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, awaitTime)
	defer cancel()
	return Statuses.When(s, id, "certificates of "+id+" for the present configuration", func(s StatusSpec) bool { return s.Current(c) }).Wait(ctx)
}

// awaitTime is ample for a few certificates.
const awaitTime = 30 * time.Second

// Statuses is the state of the secret files of the control plane, of etcd and of
// the kubelet: one for each, by the ID of its secrets.
var Statuses = resource.Define[StatusSpec](resource.Definition{
	Type: "SecretsStatuses.secrets.garboard.dev", Kind: "SecretsStatus", Namespace: "controlplane",
})

// Options are the inputs of the controllers; the zero value is a node's.
type Options struct {
	Dir string           // directory of the files; "": boot.SecretsDir
	Now func() time.Time // nil: time.Now
	// APIFile stores a worker's certificate of the machine API, with its key; "": on STATE.
	APIFile string
	// Balancer is the URL for the node's own clients of the Kubernetes API; "": balancer.URL.
	Balancer string
	// KubeletClient is the file with the client certificate of the kubelet; "": boot.KubeletClient.
	KubeletClient string
	// Dial connects from a local address; nil: the network does.
	Dial func(ctx context.Context, from netip.Addr, address string) (net.Conn, error)
}

// Controllers are the controllers of this package.
func Controllers(o Options) []resource.Controller {
	option.Default(&o.Dir, boot.SecretsDir)
	option.Default(&o.Now, time.Now)
	stored := certFile{path: o.APIFile, ready: func() bool { return true }}
	if o.APIFile == "" {
		stored = certFile{path: filepath.Join(boot.StateDir, apiFile), ready: func() bool { return boot.IsMountPoint(boot.StateDir) }}
	}
	option.Default(&o.Balancer, balancer.URL)
	option.Default(&o.Dial, dial)
	return []resource.Controller{
		{
			Name: "secrets.APIController", Reconcile: (&APIController{now: o.Now, stored: stored, signingClient: signingClient{dial: o.Dial, kubeletClient: cmp.Or(o.KubeletClient, boot.KubeletClient)}}).Reconcile,
			Inputs:  append(nodeInputs(), resource.Input{Type: balancer.APIServers.Type()}, resource.Input{Type: network.Statuses.Type()}, resource.Input{Type: Issuers.Type()}),
			Outputs: []string{API.Type()},
		},
		{
			Name: "secrets.EtcdController", Reconcile: (&EtcdController{now: o.Now}).Reconcile,
			Inputs:  nodeInputs(),
			Outputs: []string{Etcd.Type()},
		},
		{
			Name: "secrets.KubernetesController", Reconcile: (&KubernetesController{now: o.Now, balancer: o.Balancer}).Reconcile,
			Inputs:  append(nodeInputs(), resource.Input{Type: Issuers.Type()}),
			Outputs: []string{Kubernetes.Type(), Kubelet.Type()},
		},
		{
			Name: "secrets.FilesController", Reconcile: (&FilesController{dir: o.Dir}).Reconcile,
			Inputs:  []resource.Input{{Type: Kubernetes.Type(), ID: KubernetesID}, {Type: Etcd.Type(), ID: EtcdID}, {Type: Kubelet.Type(), ID: KubeletID}},
			Outputs: []string{Statuses.Type()},
		},
	}
}

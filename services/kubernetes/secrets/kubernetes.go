package secrets

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
)

// User names of the control plane's programs for the apiserver and the kubelets.
const (
	KubeletClientUser = "apiserver-kubelet-client"
	adminUser         = "admin"
	adminGroup        = "system:masters" // allowed everything, without a role binding
	controllerUser    = "system:kube-controller-manager"
	schedulerUser     = "system:kube-scheduler"
	frontProxyUser    = "front-proxy-client"
	etcdClientUser    = "kube-apiserver"
)

// encryptionInfo distinguishes the key of Secrets in etcd from other keys that
// may be derived from the cluster's secret later (HKDF, RFC 5869 3.2).
const encryptionInfo = "garboard kubernetes encryption at rest"

const encryptionKeySize = 32 // XSalsa20-Poly1305, named secretbox in Kubernetes

// KubernetesController makes the control plane's certificates.
type KubernetesController struct {
	now      func() time.Time
	balancer string
}

func (c *KubernetesController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	n, ok, err := readNode(v)
	if err != nil || !ok {
		return 0, err
	}
	cluster := &n.config.Cluster
	authorities, err := n.digests(config.KubernetesAuthority)
	if err != nil {
		return 0, err
	}
	kubelet := KubeletSpec{CA: cluster.TrustedCAs(), Issuing: cluster.CA.Crt, Authorities: authorities}
	if !n.config.Machine.Type.ControlPlane() {
		return 0, Kubelet.Put(v, KubeletID, kubelet)
	}
	// The kubelet first: it also runs where the control plane is self-hosted, and its
	// configuration lacks the secrets for static pods.
	now := c.now()
	if err := n.kubelet(v, now, &kubelet); err != nil {
		return 0, err
	}
	if err := Kubelet.Put(v, KubeletID, kubelet); err != nil {
		return 0, err
	}
	if len(cluster.AggregatorCA.Key) == 0 { // self-hosted
		return 0, reason.With(Missing, errors.New("missing cluster.aggregatorCA secret"))
	}
	have, _ := Kubernetes.Get(v, KubernetesID) // without one, all are made
	spec, err := n.kubernetes(have.Spec, now)
	if err != nil {
		return 0, err
	}
	spec.Balancer = c.balancer
	again := renewal(now, kubelet.Serving.Crt, kubelet.Client.Crt, spec.APIServer.Crt, spec.KubeletClient.Crt, spec.EtcdClient.Crt, spec.FrontProxy.Crt,
		spec.Admin.Crt, spec.ControllerManager.Crt, spec.Scheduler.Crt)
	return again, Kubernetes.Put(v, KubernetesID, spec)
}

// kubelet makes the kubelet's certificates, with the name and group that the
// cluster's own signers would use.
func (n node) kubelet(r resource.Reader, now time.Time, spec *KubeletSpec) (err error) {
	o, _ := Kubelet.Get(r, KubeletID) // without one, all are made
	have := o.Spec
	leaf := pki.Leaf{CN: config.NodeUser + n.hostname, Orgs: []string{"system:nodes"}, Now: now}
	client := leaf
	client.Client = true
	if spec.Serving, err = keep(have.Serving, n.config.Cluster.CA, n.server(leaf)); err != nil {
		return err
	}
	spec.Client, err = keep(have.Client, n.config.Cluster.CA, client)
	return err
}

// kubernetes is the spec for n. It keeps the parts of have that are still valid.
func (n node) kubernetes(have KubernetesSpec, now time.Time) (KubernetesSpec, error) {
	cluster := &n.config.Cluster
	public, err := cluster.ServiceAccount.PublicKeys()
	if err != nil {
		return have, fmt.Errorf("cluster.serviceAccount: %w", err)
	}
	spec := KubernetesSpec{
		CA:             cluster.CA,
		Trusted:        cluster.TrustedCAs(),
		EtcdCA:         config.Trusted(cluster.Etcd.CA, cluster.Etcd.AcceptedCAs),
		AggregatorCA:   config.Trusted(cluster.AggregatorCA, cluster.AcceptedAggregatorCAs),
		ServiceAccount: config.CertKey{Crt: public, Key: cluster.ServiceAccount.Key},
		Endpoint:       cluster.ControlPlane.Endpoint.String(),
		LocalEndpoint:  "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(cluster.ControlPlane.LocalAPIServerPort)),
	}
	if spec.Authorities, err = n.digests(config.KubernetesAuthority, config.EtcdAuthority, config.AggregatorAuthority, config.ServiceAccountKey, config.AtRestKey); err != nil {
		return have, err
	}
	if spec.EncryptionKeys, err = encryptionKeys(cluster); err != nil {
		return have, fmt.Errorf("cluster.secret: %w", err)
	}
	for _, c := range []struct {
		to   *config.CertKey
		have config.CertKey
		ca   config.CertKey
		want pki.Leaf
	}{
		{&spec.APIServer, have.APIServer, cluster.CA, n.apiServer()},
		{&spec.KubeletClient, have.KubeletClient, cluster.CA, pki.Leaf{CN: KubeletClientUser, Client: true}},
		{&spec.EtcdClient, have.EtcdClient, cluster.Etcd.CA, pki.Leaf{CN: etcdClientUser, Client: true}},
		{&spec.FrontProxy, have.FrontProxy, cluster.AggregatorCA, pki.Leaf{CN: frontProxyUser, Client: true}},
		{&spec.Admin, have.Admin, cluster.CA, admin},
		{&spec.ControllerManager, have.ControllerManager, cluster.CA, pki.Leaf{CN: controllerUser, Client: true}},
		{&spec.Scheduler, have.Scheduler, cluster.CA, pki.Leaf{CN: schedulerUser, Client: true}},
	} {
		c.want.Now = now
		if *c.to, err = keep(c.have, c.ca, c.want); err != nil {
			return have, err
		}
	}
	spec.APIServer, err = chained(spec.APIServer, cluster.CA, cluster.AcceptedCAs)
	return spec, err
}

// admin is allowed everything in Kubernetes.
var admin = pki.Leaf{CN: adminUser, Orgs: []string{adminGroup}, Client: true}

// Admin makes a client certificate of the administrator of Kubernetes.
func Admin(ca config.CertKey, now time.Time) (config.CertKey, error) {
	want := admin
	want.Now = now
	return keep(config.CertKey{}, ca, want)
}

// apiServer has all names of this node's apiserver: those of the node, of the
// cluster's endpoint, and of the Service kubernetes, which has the first
// address of each service subnet.
func (n node) apiServer() pki.Leaf {
	cluster := &n.config.Cluster
	leaf := pki.Leaf{
		CN:  "kube-apiserver",
		DNS: []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + cluster.Network.DNSDomain},
	}
	for _, subnet := range cluster.Network.ServiceSubnets {
		leaf.IPs = append(leaf.IPs, subnet.Masked().Addr().Next())
	}
	addHosts(&leaf, cluster.APIServer.CertSANs)
	n.addEndpoint(&leaf)
	return n.server(leaf)
}

// encryptionKeys are the keys of Secrets in etcd; none for a cluster without a secret.
func encryptionKeys(c *config.Cluster) (keys []config.KeyPEM, err error) {
	for _, secret := range append([]config.Secret{c.Secret}, c.AcceptedSecrets...) {
		seed, err := base64.StdEncoding.DecodeString(string(secret))
		if err != nil || len(seed) == 0 {
			return nil, err
		}
		key, err := hkdf.Key(sha256.New, seed, nil, encryptionInfo, encryptionKeySize)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

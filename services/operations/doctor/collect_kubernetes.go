package doctor

import (
	"context"
	"sync"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

// How Kubernetes names what is looked at.
const (
	kubeSystem      = "kube-system"
	csrVersion      = "certificates.k8s.io/v1"
	csrKind         = "CertificateSigningRequest"
	staticPodPrefix = "garboard-" // of the static pods' files
)

// cluster is what Kubernetes returned.
type cluster struct {
	through string // the URL that was asked
	as      string // in whose name
	err     error  // there is no server to ask, or no answer at all

	node    kubeclient.Object
	nodeErr error
	csrs    []kubeclient.Object
	csrsErr error
	pods    []kubeclient.Object
	refusal []refusal
}

// refusal is a webhook that refuses every request that it is asked about, as its Service has no ready pod.
type refusal struct {
	kind, name, webhook string
	service             kubeclient.Ref
}

// collectCluster asks this node's apiserver where there is one that serves, else another
// one through the node's balancer.
func (d *Doctor) collectCluster(ctx context.Context, s *snapshot) func(*snapshot) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := &cluster{}
	client, err := d.client(ctx, s, c)
	if err != nil {
		c.err = err
		return func(s *snapshot) { s.cluster = c }
	}
	defer client.Close()
	if c.err = client.Ready(ctx); c.err != nil {
		return func(s *snapshot) { s.cluster = c }
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		c.node, c.nodeErr = client.Get(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Node", Name: s.hostname})
	})
	wg.Go(func() {
		list, err := client.List(ctx, kubeclient.Ref{APIVersion: csrVersion, Kind: csrKind}, kubeclient.Selection{})
		c.csrs, c.csrsErr = list.Items(), err
	})
	wg.Go(func() {
		list, _ := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: kubeSystem}, kubeclient.Selection{Fields: "spec.nodeName=" + s.hostname})
		c.pods = list.Items()
	})
	if s.controlPlane() {
		wg.Go(func() { c.refusal = refusals(ctx, client) })
	}
	wg.Wait()
	return func(s *snapshot) { s.cluster = c }
}

// client is one with the best rights that this node has: the administrator's on a
// control plane, else the kubelet's, else those of a node that wants to join.
func (d *Doctor) client(ctx context.Context, s *snapshot, c *cluster) (*kubeclient.Client, error) {
	options := kubeclient.Options{ServerName: balancer.ServerName, CA: s.config.Cluster.TrustedCAs()}
	if o, err := secrets.Kubernetes.Get(d.o.Store, secrets.KubernetesID); err == nil {
		c.as, c.through = "admin", o.Spec.LocalEndpoint
		options.Cert, options.Key = o.Spec.Admin.Crt, o.Spec.Admin.Key
		options.Server = o.Spec.LocalEndpoint
		local, err := kubeclient.New(options)
		if err != nil {
			return nil, err
		}
		if local.Ready(ctx) == nil {
			return local, nil
		}
		local.Close()
		c.through, options.Server = d.o.balancer, d.o.balancer
		return kubeclient.New(options)
	}
	c.through, options.Server = d.o.balancer, d.o.balancer
	if _, err := readSmall(d.path(clientFile)); err == nil {
		c.as, options.CertFile = config.NodeUser+s.hostname, d.path(clientFile)
	} else {
		c.as, options.Token = "the bootstrap token", string(s.config.Cluster.Token)
	}
	return kubeclient.New(options)
}

// refusals are the webhooks without a ready pod whose failurePolicy is Fail, the default.
func refusals(ctx context.Context, client *kubeclient.Client) (all []refusal) {
	for _, kind := range []string{"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"} {
		list, _ := client.List(ctx, kubeclient.Ref{APIVersion: "admissionregistration.k8s.io/v1", Kind: kind}, kubeclient.Selection{})
		for _, o := range list.Items() {
			for _, w := range o.List("webhooks") {
				service, err := controlplane.Unserved(ctx, client, kubeclient.Object{"webhooks": []any{map[string]any(w)}})
				if w.Text("failurePolicy") != "Ignore" && err == nil && service.Name != "" {
					all = append(all, refusal{kind, o.Name(), w.Text("name"), service})
				}
			}
		}
	}
	return all
}

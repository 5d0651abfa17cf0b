package doctor

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"sync"

	"github.com/garboard-os/garboard/boot/untrusted"
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
	apiService      = "APIService"
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

// refusal is a webhook that refuses every request that it is asked about, or an APIService, for want of something.
type refusal struct {
	kind, name, webhook, namespace, lacks string

	starts bool // its Service exists, and the boot of a node starts its pods
}

// collectCluster asks this node's apiserver where there is one that serves, else another
// one through the node's balancer.
func (d *Doctor) collectCluster(ctx context.Context, s *snapshot) func(*snapshot) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := &cluster{}
	var client *kubeclient.Client
	for _, how := range d.ways(s, c) {
		if client, c.err = kubeclient.New(how); c.err == nil {
			defer client.Close()
			c.err = client.Ready(ctx)
		}
		if c.through = how.Server; c.err == nil {
			break
		}
	}
	if c.err != nil {
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
		list, _ := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod"}, kubeclient.Selection{Fields: "spec.nodeName=" + s.hostname})
		c.pods = list.Items()
	})
	if s.controlPlane() {
		wg.Go(func() { c.refusal = refusals(ctx, client) })
	}
	wg.Wait()
	return func(s *snapshot) { s.cluster = c }
}

// ways are clients with the best rights that this node has: the administrator's on a
// control plane, else the kubelet's, else those of a node that wants to join.
func (d *Doctor) ways(s *snapshot, c *cluster) []kubeclient.Options {
	how := balancer.Client(s.config, "")
	how.Server, c.as = d.o.balancer, "the bootstrap token"
	if untrusted.Exists(d.path(clientFile)) {
		how.Token, how.CertFile, c.as = "", d.path(clientFile), config.NodeUser+s.hostname
	}
	o, err := secrets.Kubernetes.Get(d.o.Store, secrets.KubernetesID)
	if err != nil {
		return []kubeclient.Options{how}
	}
	how = kubeclient.Options{Server: d.o.balancer, ServerName: how.ServerName, CA: how.CA, Cert: o.Spec.Admin.Crt, Key: o.Spec.Admin.Key}
	own := how
	own.Server, c.as = o.Spec.LocalEndpoint, "admin"
	return []kubeclient.Options{own, how}
}

// refusals are the webhooks whose failurePolicy is Fail, the default, and the APIServices that don't answer: their
// Service has no ready pod, or their URL no server.
func refusals(ctx context.Context, client *kubeclient.Client) (all []refusal) {
	for _, kind := range []string{"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration", apiService} {
		version := map[bool]string{false: "admissionregistration.k8s.io/v1", true: "apiregistration.k8s.io/v1"}[kind == apiService]
		list, _ := client.List(ctx, kubeclient.Ref{APIVersion: version, Kind: kind}, kubeclient.Selection{})
		for _, o := range list.Items() {
			// an APIService has its Service there
			for _, w := range append(o.List("webhooks"), kubeclient.Object{"clientConfig": o["spec"]}) {
				service, err := controlplane.Unserved(ctx, client, kubeclient.Object{"webhooks": []any{map[string]any(w)}})
				r := refusal{kind: kind, name: o.Name(), webhook: w.Text("name"), namespace: service.Namespace}
				if url := w.Text("clientConfig", "url"); url != "" { // who it is doesn't matter
					if a := ask(ctx, url, netip.Addr{}, &tls.Config{InsecureSkipVerify: true}); a.err != nil {
						r.lacks = a.text()
					}
				} else if err == nil && service.Name != "" {
					_, err := client.Get(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Service", Namespace: service.Namespace, Name: service.Name})
					r.starts = !kubeclient.IsNotFound(err)
					r.lacks = fmt.Sprintf("Service %s/%s %s", service.Namespace, service.Name, map[bool]string{true: "has no ready pod", false: "doesn't exist"}[r.starts])
				}
				if r.lacks != "" && w.Text("failurePolicy") != "Ignore" {
					all = append(all, r)
				}
			}
		}
	}
	return all
}

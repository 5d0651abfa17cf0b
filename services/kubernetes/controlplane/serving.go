package controlplane

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	servingSigner = "kubernetes.io/kubelet-serving"
	nodeUser      = "system:node:" // and the node's name
	nodeGroup     = "system:nodes"

	// servingWatch is the duration of one watch of the requests; a server ends
	// them after some minutes in any case.
	servingWatch = 5 * time.Minute
	// servingAgain is the pause before another look at requests that couldn't be
	// approved: the node may be about to report its address.
	servingAgain = 10 * time.Second
	// servingRetry is the pause while there is no API server.
	servingRetry = time.Second
)

// servingRequests are the requests for the kubelets' serving certificates.
var (
	servingRequests  = kubeclient.Ref{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"}
	servingSelection = kubeclient.Selection{Fields: "spec.signerName=" + servingSigner}
	allNodes         = kubeclient.Ref{APIVersion: "v1", Kind: "Node"}
)

// ServingApprovalController approves the serving certificates of workers'
// kubelets. Kubernetes signs them, but doesn't decide whether a node may have the
// requested names: without an approval, logs from that node aren't available.
//
// It changes nothing for control planes: their nodes issue the kubelets' certificates.
type ServingApprovalController struct{ refused map[string]string }

// Reconcile stays in the watch: an idle cluster has no cost, and a request is
// answered at once.
func (c *ServingApprovalController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	keys, client, err := ownAdmin(v)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	defer client.Close()
	if client.Ready(ctx) != nil {
		return servingRetry, nil // other controllers report that the apiserver is down
	}
	server, err := pki.ParseCert(keys.APIServer.Crt)
	if err != nil {
		return 0, err
	}
	list, err := client.List(ctx, servingRequests, servingSelection)
	if err != nil {
		return 0, err
	}
	left, seen := false, map[string]string{}
	for _, request := range list.Items() {
		if answered(request) {
			continue
		}
		why, err := c.answer(ctx, v, client, server, request)
		if err != nil {
			return 0, err
		}
		if why != "" {
			left, seen[request.Name()] = true, why
		}
	}
	c.refused = seen
	limit := servingWatch
	if left {
		limit = servingAgain
	}
	return watchUntil(ctx, client, servingRequests, servingSelection, list, limit, servingRetry, func(e kubeclient.Event) bool {
		return e.Type == kubeclient.Added && !answered(e.Object)
	}), nil
}

// errAsked ends a watch: there is a request to answer.
var errAsked = errors.New("a new request")

// watchUntil watches what follows on a list until an object asks for something, or the
// limit is over. It returns the pause before the next list.
func watchUntil(ctx context.Context, client *kubeclient.Client, of kubeclient.Ref, sel kubeclient.Selection, list kubeclient.Object, limit, retry time.Duration, asks func(kubeclient.Event) bool) time.Duration {
	err := client.Watch(ctx, of, sel, list.ResourceVersion(), limit, func(e kubeclient.Event) error {
		if asks(e) {
			return errAsked
		}
		return nil
	})
	if err == nil || errors.Is(err, errAsked) {
		return soon
	}
	return retry // the watch ended; the next list fails if the server is down
}

func answered(request kubeclient.Object) bool {
	return request.Condition("Approved") || request.Condition("Denied") || request.Condition("Failed")
}

// answer approves a request, or logs the reason why not. It denies none: a
// request that doesn't fit now may fit after the node has reported a new address.
func (c *ServingApprovalController) answer(ctx context.Context, v resource.View, client *kubeclient.Client, server *x509.Certificate, request kubeclient.Object) (why string, err error) {
	nodes, err := client.List(ctx, allNodes, kubeclient.Selection{})
	if err != nil {
		return "", err
	}
	if problem := checkServing(request, nodes.Items(), server); problem != nil {
		why = problem.Error()
		if c.refused[request.Name()] != why {
			v.Log().Warn(fmt.Sprintf("request %s of %s for a serving certificate is not approved: %v", request.Name(), request.Text("spec", "username"), problem))
		}
		return why, nil
	}
	if err := client.ApproveCSR(ctx, request.Name(), "names and addresses are those of the node"); err != nil {
		return "", err
	}
	v.Log().Info(fmt.Sprintf("approved request %s of %s for a serving certificate", request.Name(), request.Text("spec", "username")))
	return "", nil
}

// servingUsages are the usages that a kubelet requests; the second is for RSA keys only.
var servingUsages = []string{"digital signature", "key encipherment", "server auth"}

// checkServing returns what is wrong with a request. A node may have its own
// name and its own addresses. The node itself reports its addresses to
// Kubernetes, so they count only if no other node has them, and the API server's
// certificate doesn't have them: otherwise a worker could take their place. The certificate of another control plane isn't known here, so
// nobody gets one for a control plane.
func checkServing(request kubeclient.Object, nodes []kubeclient.Object, server *x509.Certificate) error {
	user := request.Text("spec", "username")
	name, isNode := strings.CutPrefix(user, nodeUser)
	groups, _ := request.At("spec", "groups").([]any)
	if !isNode || !slices.Contains(groups, any(nodeGroup)) {
		return fmt.Errorf("%q isn't a node", user)
	}
	csr, err := parseServing(request)
	if err != nil {
		return err
	}
	if csr.Subject.CommonName != user || !slices.Equal(csr.Subject.Organization, []string{nodeGroup}) {
		return fmt.Errorf("subject is %q, not the node's", csr.Subject)
	}
	own, others := map[string]bool{}, map[string]string{}
	registered := false
	for _, n := range nodes {
		for _, a := range n.List("status", "addresses") {
			if n.Name() == name {
				own[a.Text("address")] = true
			} else {
				others[a.Text("address")] = n.Name()
			}
		}
		if n.Name() == name {
			registered = true
			if n.At("metadata", "labels", config.ControlPlaneRole) != nil {
				return fmt.Errorf("node %q is a control plane, and makes its own; for one of kubeadm: kubectl certificate approve %s", name, request.Name())
			}
		}
	}
	if !registered {
		return fmt.Errorf("there is no node %q", name)
	}
	for _, dns := range csr.DNSNames {
		if dns != name || slices.Contains(server.DNSNames, dns) {
			return fmt.Errorf("name %q isn't the node's alone", dns)
		}
	}
	for _, ip := range csr.IPAddresses {
		addr, _ := netip.AddrFromSlice(ip)
		text := addr.Unmap().String()
		switch {
		case !own[text]:
			return fmt.Errorf("address %s isn't the node's", text)
		case others[text] != "":
			return fmt.Errorf("address %s is also that of node %q", text, others[text])
		case slices.ContainsFunc(server.IPAddresses, ip.Equal):
			return fmt.Errorf("address %s is the API server's", text)
		}
	}
	return nil
}

// parseServing reads a request, and checks everything that doesn't depend on its sender.
func parseServing(request kubeclient.Object) (*x509.CertificateRequest, error) {
	if signer := request.Text("spec", "signerName"); signer != servingSigner {
		return nil, fmt.Errorf("it is for signer %q", signer)
	}
	usages, _ := request.At("spec", "usages").([]any)
	for _, u := range usages {
		if text, _ := u.(string); !slices.Contains(servingUsages, text) {
			return nil, fmt.Errorf("usage %q isn't for serving", u)
		}
	}
	text, err := base64.StdEncoding.DecodeString(request.Text("spec", "request"))
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(rest) > 0 {
		return nil, errors.New("request isn't one PEM block of a certificate request")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, err
	}
	if len(csr.EmailAddresses)+len(csr.URIs) > 0 {
		return nil, errors.New("it asks for e-mail addresses or URIs")
	}
	if len(csr.DNSNames)+len(csr.IPAddresses) == 0 {
		return nil, errors.New("it asks for no name and no address")
	}
	return csr, nil
}

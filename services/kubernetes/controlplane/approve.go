package controlplane

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	servingSigner = "kubernetes.io/kubelet-serving"
	clientSigner  = "kubernetes.io/kube-apiserver-client-kubelet"
	nodeGroup     = "system:nodes"
	// joinGroup is of those who have a token for joining.
	joinGroup = "system:bootstrappers"

	// approvalWatch is the duration of one watch of the requests; a server ends
	// them after some minutes in any case.
	approvalWatch = 5 * time.Minute
	// approvalAgain is the pause before another look at requests that couldn't be
	// approved: the node may be about to report its address.
	approvalAgain = 10 * time.Second
	// approvalRetry is the pause while there is no API server.
	approvalRetry = time.Second
)

var (
	certificateRequests = kubeclient.Ref{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"}
	allNodes            = kubeclient.Ref{APIVersion: "v1", Kind: "Node"}
)

// ApprovalController decides about the certificates of workers' kubelets, in the place of
// Kubernetes, which signs them. Kubernetes would give whoever has a token for joining a
// client certificate of any node, would renew that for whoever has it, and approves no serving
// certificate: without one, logs from that node aren't available.
//
// Who gets a client certificate is recorded before, and so the name is one machine's only.
//
// It changes nothing for control planes: their nodes issue the kubelets' certificates.
type ApprovalController struct {
	roster  func(ctx context.Context) (roster.Facts, error)
	enlist  func(ctx context.Context, name string, r roster.Record) error
	refused map[string]string
}

// Reconcile stays in the watch: an idle cluster has no cost, and a request is
// answered at once.
func (c *ApprovalController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	cfg, err := configuration.Config(v)
	if err != nil || !cfg.Machine.Type.ControlPlane() {
		return 0, resource.IgnoreNotFound(err)
	}
	client, err := AdminClient(v)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	defer client.Close()
	if client.Ready(ctx) != nil {
		return approvalRetry, nil // other controllers report that the apiserver is down
	}
	list, err := client.List(ctx, certificateRequests, kubeclient.Selection{})
	if err = cmp.Or(err, c.closeBindings(ctx, v, client)); err != nil {
		return 0, err
	}
	left, seen := false, map[string]string{}
	for _, request := range list.Items() {
		if !ours(request) {
			continue
		}
		why, err := c.answer(ctx, v, client, request)
		// trustd, or another control plane, may have changed the record of the node meanwhile: it is read again
		if err != nil {
			why, err = c.answer(ctx, v, client, request)
		}
		if err != nil {
			return 0, err
		}
		if why != "" {
			left, seen[request.Name()] = true, why
		}
	}
	c.refused = seen
	limit := approvalWatch
	if left {
		limit = approvalAgain
	}
	return watchUntil(ctx, client, certificateRequests, list, limit, approvalRetry, func(e kubeclient.Event) bool {
		return e.Type == kubeclient.Added && ours(e.Object)
	}), nil
}

// formerBindings are bootstrap manifests of releases whose clusters approve each request of
// whoever is in the group: a token for joining, or the certificate of a node.
var formerBindings = map[string]string{"system-bootstrap-approve-node-client-csr": joinGroup, "system-bootstrap-node-renewal": nodeGroup}

// closeBindings takes the groups out of the bindings. They are the objects of the bootstrap manifests that
// are changed: with the first, a token gives the names of all nodes; with the second, a name is had for ever.
// They stay, as control planes of a former release make missing ones again.
func (c *ApprovalController) closeBindings(ctx context.Context, v resource.View, client *kubeclient.Client) error {
	for name, group := range formerBindings {
		ref := kubeclient.Ref{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRoleBinding", Name: name}
		binding, err := client.Get(ctx, ref)
		subjects := binding.List("subjects")
		left := slices.DeleteFunc(slices.Clone(subjects), func(s kubeclient.Object) bool { return s.Text("name") == group })
		if len(left) < len(subjects) {
			v.Log().Info(fmt.Sprintf("%s doesn't approve requests of %s any more: the control planes do", ref, group))
			_, err = client.Merge(ctx, ref, kubeclient.Object{"subjects": left})
		}
		if err := kubeclient.IgnoreNotFound(err); err != nil {
			return err
		}
	}
	return nil
}

// errAsked ends a watch: there is a request to answer.
var errAsked = errors.New("a new request")

// watchUntil watches what follows on a list until an object asks for something, or the
// limit is over. It returns the pause before the next list.
func watchUntil(ctx context.Context, client *kubeclient.Client, of kubeclient.Ref, list kubeclient.Object, limit, retry time.Duration, asks func(kubeclient.Event) bool) time.Duration {
	err := client.Watch(ctx, of, kubeclient.Selection{}, list.ResourceVersion(), limit, func(e kubeclient.Event) error {
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

// ours is a request that waits for this controller.
func ours(request kubeclient.Object) bool {
	if request.Condition("Approved") || request.Condition("Denied") || request.Condition("Failed") {
		return false
	}
	switch request.Text("spec", "signerName") {
	case servingSigner:
		return true
	case clientSigner:
		return inGroup(request, joinGroup) || inGroup(request, nodeGroup)
	}
	return false
}

func inGroup(request kubeclient.Object, group string) bool {
	groups, _ := request.At("spec", "groups").([]any)
	return slices.Contains(groups, any(group))
}

// answer approves a request, or says why not. A client certificate is denied, so that the
// node learns the reason, and asks again later. A kubelet's own request isn't, as the kubelet would repeat it
// at once; nor one for a serving certificate: it may fit after the node has reported a new address.
func (c *ApprovalController) answer(ctx context.Context, v resource.View, client *kubeclient.Client, request kubeclient.Object) (why string, err error) {
	user, signer := request.Text("spec", "username"), request.Text("spec", "signerName")
	nodes, err := client.List(ctx, allNodes, kubeclient.Selection{})
	if err != nil {
		return "", err
	}
	facts, err := c.roster(ctx) // it has seen all of nodes
	if err != nil || facts.Records == nil {
		return "this control plane is no member of etcd yet", err // the others know the nodes
	}
	name, by, problem := checkServing(request, nodes.Items(), facts)
	if signer == clientSigner {
		name, by, problem = checkClient(v, request, facts)
	}
	if problem == nil && by.Key != "" {
		if err := c.enlist(ctx, name, by); err != nil {
			return "", err
		}
	}
	switch {
	case problem == nil:
		if err := client.DecideCSR(ctx, request.Name(), kubeclient.Approved, "", "names and addresses are those of the node"); err != nil {
			return "", err
		}
		v.Log().Info(fmt.Sprintf("approved request %s of %s for a certificate (%s)", request.Name(), user, signer))
		return "", nil
	case signer == clientSigner && (inGroup(request, joinGroup) || request.Text("metadata", "annotations", kubeclient.JoinProof) != ""):
		v.Log().Warn(fmt.Sprintf("request %s of %s for a client certificate is denied: %v", request.Name(), user, problem))
		return "", client.DecideCSR(ctx, request.Name(), kubeclient.Denied, string(reason.Of(problem)), problem.Error())
	}
	if why = problem.Error(); c.refused[request.Name()] != why {
		v.Log().Warn(fmt.Sprintf("request %s of %s for a certificate (%s) is not approved: %v", request.Name(), user, signer, problem))
	}
	return why, nil
}

var (
	// servingUsages are the usages that a kubelet requests; the second is for RSA keys only.
	servingUsages = []string{"digital signature", "key encipherment", "server auth"}
	clientUsages  = []string{"digital signature", "key encipherment", "client auth"}
)

// checkClient returns what is wrong with the request for a node's client certificate, and the machine that gets the
// name: its request has the proof that this machine has made it. A node of a former release renews without one.
func checkClient(r resource.Reader, request kubeclient.Object, facts roster.Facts) (name string, by roster.Record, err error) {
	csr, err := parseRequest(request, clientUsages)
	if err != nil {
		return "", by, err
	}
	name, isNode := strings.CutPrefix(csr.Subject.CommonName, config.NodeUser)
	renews := inGroup(request, nodeGroup)
	switch {
	case !isNode || name == "" || !slices.Equal(csr.Subject.Organization, []string{nodeGroup}):
		return name, by, fmt.Errorf("subject is %q, not a node's", csr.Subject)
	case len(csr.DNSNames)+len(csr.IPAddresses) > 0:
		return name, by, errors.New("it asks for names or addresses")
	case renews && request.Text("spec", "username") != csr.Subject.CommonName:
		return name, by, fmt.Errorf("subject is %q, not the node's", csr.Subject)
	}
	unproven := error(nil)
	if proof := request.Text("metadata", "annotations", kubeclient.JoinProof); proof != "" {
		if by, unproven = provenBy(r, proof, kubeclient.JoinPurpose, csr.Raw, name, facts.Now); by.Key == "" {
			return name, by, unproven
		}
	}
	taken := map[bool]func(name, key string) error{false: facts.MayJoin, true: facts.MayRenew}[renews](name, by.Key)
	if taken != nil && unproven != nil {
		taken = fmt.Errorf("%w (%w)", taken, unproven) // the owner of the name learns which machine wants it
	}
	return name, facts.Renewed(name, by), cmp.Or(taken, unproven) // until trustd has given the machine its new name
}

// provenBy is the machine that has made a message: the key of its machine API, and its address. With a key, the error
// is that the machine has the certificate of another name.
func provenBy(r resource.Reader, proof, purpose string, message []byte, name string, now time.Time) (by roster.Record, err error) {
	cfg, err := configuration.Config(r)
	if err != nil {
		return by, err
	}
	cert, err := pki.CheckProof([]byte(proof), cfg.Machine.TrustedCAs(), purpose, message, now)
	if err != nil {
		return by, err
	}
	by.Certified = true
	if i := slices.IndexFunc(cert.IPAddresses, func(ip net.IP) bool { return !ip.IsLoopback() }); i >= 0 {
		by.Address, _ = netip.AddrFromSlice(cert.IPAddresses[i])
	}
	by.Key, err = pki.KeyID(cert.PublicKey)
	if err == nil && cert.Subject.CommonName != name {
		err = fmt.Errorf("the proof is of %q, and not of %q", cert.Subject.CommonName, name)
	}
	return by, err
}

// checkServing returns what is wrong with a request, and the record of the machine with the addresses that it serves
// with from now on: no other one gets a certificate for them. A node may have its own name and its own addresses. The
// node itself reports its addresses to Kubernetes, so they count only if no other node has them, and no other machine
// had them when it got its certificates: otherwise a worker could take their place. What Node objects say of themselves
// can only make less possible.
func checkServing(request kubeclient.Object, nodes []kubeclient.Object, facts roster.Facts) (name string, by roster.Record, err error) {
	user := request.Text("spec", "username")
	name, isNode := strings.CutPrefix(user, config.NodeUser)
	if !isNode || !inGroup(request, nodeGroup) {
		return name, by, fmt.Errorf("%q isn't a node", user)
	}
	csr, err := parseRequest(request, servingUsages)
	if err != nil {
		return name, by, err
	}
	if len(csr.DNSNames)+len(csr.IPAddresses) == 0 {
		return name, by, errors.New("it asks for no name and no address")
	}
	if csr.Subject.CommonName != user || !slices.Equal(csr.Subject.Organization, []string{nodeGroup}) {
		return name, by, fmt.Errorf("subject is %q, not the node's", csr.Subject)
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
				return name, by, fmt.Errorf("node %q is a control plane, and makes its own; for one of kubeadm: kubectl certificate approve %s", name, request.Name())
			}
		}
	}
	if !registered {
		return name, by, fmt.Errorf("there is no node %q", name)
	}
	by, _ = facts.Record(name) // without a key, it isn't recorded
	by.Addresses = nil
	for _, dns := range csr.DNSNames {
		if dns != name || slices.Contains(facts.Names, strings.ToLower(dns)) {
			return name, by, fmt.Errorf("name %q isn't the node's alone", dns)
		}
	}
	for _, ip := range csr.IPAddresses {
		addr, _ := netip.AddrFromSlice(ip)
		text := addr.Unmap().String()
		switch {
		case !own[text]:
			return name, by, fmt.Errorf("address %s isn't the node's", text)
		case others[text] != "":
			return name, by, fmt.Errorf("address %s is also that of node %q", text, others[text])
		}
		if err := facts.MayServe(name, addr.Unmap()); err != nil {
			return name, by, err
		}
		by.Addresses = append(by.Addresses, addr.Unmap())
	}
	return name, by, nil
}

// parseRequest reads a request, and checks everything that doesn't depend on its sender.
func parseRequest(request kubeclient.Object, may []string) (*x509.CertificateRequest, error) {
	usages, _ := request.At("spec", "usages").([]any)
	for _, u := range usages {
		if text, _ := u.(string); !slices.Contains(may, text) {
			return nil, fmt.Errorf("usage %q isn't one of %s", u, strings.Join(may, ", "))
		}
	}
	text, err := base64.StdEncoding.DecodeString(request.Text("spec", "request"))
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	csr, err := pki.ParseRequest(text) // the first one, as Kubernetes does that signs it
	if err != nil {
		return nil, err
	}
	if len(csr.EmailAddresses)+len(csr.URIs) > 0 {
		return nil, errors.New("it asks for e-mail addresses or URIs")
	}
	return csr, nil
}

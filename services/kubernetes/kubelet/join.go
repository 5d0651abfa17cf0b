package kubelet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// joinAgain is the pause between two requests, or two tries to make one: a cluster that
	// begins, and a node that is being recorded, take seconds. It grows to joinAgainMax: each
	// request is an object that Kubernetes keeps for an hour.
	joinAgain    = time.Second
	joinAgainMax = time.Minute
	// joinAnswer is how long one request may wait for its certificate.
	joinAnswer = 30 * time.Second
	joinPoll   = 250 * time.Millisecond
	// renewLook is the pause between two looks whether the certificate is due: it has four months then.
	renewLook = 10 * time.Minute
	// nameAsk is the time for Kubernetes to say who has a name: the kubelet of a cluster's first
	// control plane starts without an answer.
	nameAsk = 3 * time.Second
	// leaseFresh is how long a kubelet that runs leaves its lease alone at most
	// (node-monitor-grace-period): the machine of an older lease doesn't run.
	leaseFresh = 50 * time.Second
)

// join returns once the kubelet has a client certificate, and its name. A worker asks the cluster
// for both:
//
//	node ── key, request, proof, with the token ──▶ control planes (ApprovalController) ──▶ Kubernetes signs
//
// The proof is made with the key of the machine API, for which the machine has a certificate before: without it, no
// name is given. Control planes of a former release give one that no node has: so it is left out if none signs.
func (o Options) join(ctx context.Context, h *dag.Handle) error {
	told, pause := "", joinAgain
	for {
		has, err := o.prepare()
		if err != nil {
			return err
		}
		if has {
			if err = o.checkName(ctx); err == nil {
				return nil
			}
		} else if err = o.askForCertificate(ctx, false); err == nil {
			continue // prepare writes how to use it
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if why := err.Error(); why != told {
			h.EventOf(reason.Of(err), map[bool]string{false: "Waiting for a client certificate of Kubernetes: ", true: "Waiting for the node's name: "}[has]+why)
			told, pause = why, joinAgain
		}
		if !sleep.For(ctx, pause) {
			return ctx.Err()
		}
		pause = sleep.Longer(pause, joinAgain, joinAgainMax)
	}
}

// kubernetes is a client for this node, with its name. joined: as the node, and not with the token.
func (o Options) kubernetes(joined bool) (cfg *config.Config, name string, client *kubeclient.Client, err error) {
	cfg, err = configuration.Config(o.Store)
	hostname, none := network.Hostnames.Get(o.Store, network.HostnameID)
	if err = cmp.Or(err, none); err != nil {
		return nil, "", nil, err
	}
	client, err = kubeclient.New(balancer.Client(cfg, map[bool]string{true: clientFile}[joined]))
	return cfg, hostname.Spec, client, err
}

// checkName returns an error while a machine that runs has the name of this control plane, which
// makes its certificate itself. Who can make it wait, with a Node, is root on a control plane. On a worker,
// it removes a certificate that isn't one of the cluster.
func (o Options) checkName(ctx context.Context) error {
	cfg, name, client, err := o.kubernetes(true)
	if err != nil {
		return err
	}
	defer client.Close()
	if !cfg.Machine.Type.ControlPlane() {
		s, err := secrets.Kubelet.Get(o.Store, secrets.KubeletID)
		return cmp.Or(err, forgetForeign(clientFile, s.Spec, func() error {
			_, err := client.Get(ctx, kubeclient.NodeRef(name))
			return kubeclient.IgnoreNotFound(err)
		}))
	}
	own, err := os.ReadFile(boot.MachineIDFile)
	if err != nil {
		return err
	}
	return nameTaken(ctx, client, name, strings.TrimSpace(string(own)))
}

// nameTaken is nil if no other machine that runs has the name, and if there is no answer.
func nameTaken(ctx context.Context, client *kubeclient.Client, name, own string) error {
	ctx, cancel := context.WithTimeout(ctx, nameAsk)
	defer cancel()
	node, _ := client.Get(ctx, kubeclient.NodeRef(name))
	id := node.Text("status", "nodeInfo", "machineID")
	if id == "" || id == own {
		return nil
	}
	lease, _ := client.Get(ctx, kubeclient.Ref{APIVersion: "coordination.k8s.io/v1", Kind: "Lease", Namespace: "kube-node-lease", Name: name})
	// A kubelet makes the lease some seconds after the Node.
	if time.Since(cmp.Or(lease.Time("spec", "renewTime"), node.Time("metadata", "creationTimestamp"))).Abs() > leaseFresh {
		return nil
	}
	at := append(node.List("status", "addresses"), nil)[0].Text("address")
	return reason.With(roster.NameTaken, fmt.Errorf("the machine %s has the name %s, at %s; give one of the two another machine.network.hostname, or switch that one off", id, name, at))
}

// renew returns an error when the kubelet has to start anew, because there is another client certificate: the one of a
// control plane is made by the node, and a worker asks with the one that it has. The time for that is
// before the kubelet would ask by itself (at 70 % of its validity), without a proof.
func (o Options) renew(ctx context.Context, h *dag.Handle) error {
	for told := ""; ctx.Err() == nil; sleep.For(ctx, renewLook) {
		have, err := untrusted.ReadLinked(clientFile, maxFile)
		s, none := secrets.Kubelet.Get(o.Store, secrets.KubeletID)
		switch made := s.Spec.Client.Crt; {
		case cmp.Or(err, none) != nil || len(made) > 0 && bytes.HasPrefix(have, made) || len(made) == 0 && !due(have, time.Now(), pki.RenewBefore):
			continue
		case len(made) == 0:
			err = o.askForCertificate(ctx, true)
		}
		if err == nil {
			return errors.New("there is another client certificate of Kubernetes: the kubelet starts anew with it")
		}
		if why := err.Error(); why != told && ctx.Err() == nil {
			h.EventOf(reason.Of(err), "The client certificate of Kubernetes isn't renewed: "+why)
			told = why
		}
	}
	return nil
}

// due is whether a certificate ends within some time. If kube-controller-manager signs for less than a year, within a
// third of that.
func due(have []byte, now time.Time, within time.Duration) bool {
	cert, err := pki.ParseCert(have)
	return err == nil && cert.NotAfter.Sub(now) < min(within, cert.NotAfter.Sub(cert.NotBefore)/3)
}

// askForCertificate makes one request, and writes the certificate that it gets. renews: it has one.
func (o Options) askForCertificate(ctx context.Context, renews bool) error {
	ctx, cancel := context.WithTimeout(ctx, joinAnswer)
	defer cancel()
	first, stop := context.WithTimeout(ctx, joinAnswer/2)
	defer stop()
	_ = secrets.API.When(o.Store, secrets.APIID, "", nil).Wait(first)
	_, name, client, err := o.kubernetes(renews)
	if err != nil {
		return err
	}
	defer client.Close()
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		return err
	}
	request, err := joinRequest(name, key, func(message []byte) ([]byte, error) {
		return secrets.Prove(o.Store, kubeclient.JoinPurpose, message)
	})
	if err != nil {
		return err
	}
	made, err := client.Create(ctx, request)
	if err != nil {
		return err
	}
	crt, err := awaitCertificate(ctx, client, made.Ref())
	if err != nil {
		return err
	}
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return err
	}
	if cert.Subject.CommonName != user(name) {
		return fmt.Errorf("the certificate is for %q", cert.Subject.CommonName)
	}
	return untrusted.WriteFile(clientFile, slices.Concat(crt, key), 0o600)
}

// joinRequest is the object that asks for a certificate for a key.
func joinRequest(name string, key config.KeyPEM, prove func(message []byte) ([]byte, error)) (kubeclient.Object, error) {
	text, err := pki.NewRequest(key, pki.Leaf{CN: user(name), Orgs: []string{"system:nodes"}})
	if err != nil {
		return nil, err
	}
	meta := map[string]any{"generateName": "node-csr-"}
	if block, _ := pem.Decode(text); block != nil {
		if proof, err := prove(block.Bytes); err == nil {
			meta["annotations"] = map[string]any{kubeclient.JoinProof: string(proof)}
		}
	}
	return kubeclient.Object{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": meta,
		"spec": map[string]any{
			"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "request": base64.StdEncoding.EncodeToString(text),
			"usages": []any{"digital signature", "client auth"},
		},
	}, nil
}

// awaitCertificate returns the certificate of a request, or why there is none.
func awaitCertificate(ctx context.Context, client *kubeclient.Client, request kubeclient.Ref) (config.PEM, error) {
	var now kubeclient.Object
	for range sleep.Every(ctx, joinPoll) {
		var err error
		if now, err = client.Get(ctx, request); err != nil {
			return nil, err
		}
		for _, condition := range now.List("status", "conditions") {
			if kind := condition.Text("type"); kind == kubeclient.Denied || kind == "Failed" {
				return nil, reason.With(reason.Code(condition.Text("reason")), errors.New(condition.Text("message")))
			}
		}
		if text := now.Text("status", "certificate"); text != "" {
			return base64.StdEncoding.DecodeString(text)
		}
	}
	why := "no control plane has approved"
	if now.Condition(kubeclient.Approved) {
		why = "kube-controller-manager hasn't signed"
	}
	return nil, fmt.Errorf("%s the request %s within %s", why, request.Name, joinAnswer)
}

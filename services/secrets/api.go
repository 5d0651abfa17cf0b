package secrets

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/resource"
)

// APISpec is what the machine API is served with. PEM.
type APISpec struct {
	CA      config.PEM     `yaml:"ca"` // whose certificates clients show
	Serving config.CertKey `yaml:"serving"`
}

// API is the secrets of apid. A worker doesn't hold the authority's key, and so
// has none that it made itself (S-157).
var API = resource.Define[APISpec](resource.Definition{
	Type: "APISecrets.secrets.garboard.dev", Kind: "APISecret", Namespace: namespace,
})

// APIController makes the machine API's certificate.
type APIController struct{ now func() time.Time }

// Name implements resource.Controller.
func (*APIController) Name() string { return "secrets.APIController" }

// Inputs implements resource.Controller.
func (*APIController) Inputs() []resource.Input { return nodeInputs() }

// Outputs implements resource.Controller.
func (*APIController) Outputs() []string { return []string{API.Type()} }

// Reconcile implements resource.Controller.
func (c *APIController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	n, ok, err := readNode(v)
	if err != nil || !ok || !n.config.Machine.Type.ControlPlane() {
		return 0, err
	}
	ca := n.config.Machine.CA
	if len(ca.Crt) == 0 || len(ca.Key) == 0 {
		return 0, missingMachine("ca")
	}
	var have APISpec
	if o, err := API.Get(v, APIID); err == nil {
		have = o.Spec
	}
	now := c.now()
	serving, err := keep(have.Serving, ca, n.api(now))
	if err != nil {
		return 0, err
	}
	return renewal(now, serving.Crt), API.Put(v, APIID, APISpec{CA: ca.Crt, Serving: serving})
}

// api has all names under which this node's machine API is reached: as the node,
// and, on a control plane, as the cluster's endpoint.
func (n node) api(now time.Time) pki.Leaf {
	leaf := pki.Leaf{CN: n.hostname, Now: now}
	addHosts(&leaf, n.config.Machine.CertSANs)
	n.addEndpoint(&leaf)
	return n.server(leaf)
}

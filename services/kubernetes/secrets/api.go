package secrets

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
)

// APISpec is the certificates of the machine API. PEM.
type APISpec struct {
	CA      config.PEM     `yaml:"ca"` // the authorities of clients' certificates
	Serving config.CertKey `yaml:"serving"`
}

// API is the secrets of apid. A worker doesn't have the authority's key, and so
// can't make them itself.
var API = resource.Define[APISpec](resource.Definition{
	Type: "APISecrets.secrets.garboard.dev", Kind: "APISecret", Namespace: namespace,
})

// APIController makes the machine API's certificate or, on a worker, gets it from a
// control plane.
type APIController struct {
	now    func() time.Time
	stored certFile
	signingClient
}

// askAgain is the pause if no control plane has signed. It doesn't grow: in a new cluster
// the control planes, and the kubelet, through which they are found, start within a
// minute. trustd allows a node to ask that often (perAddress in services/front/trustd).
const askAgain = 5 * time.Second

func (c *APIController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	n, ok, err := readReachable(v)
	if err != nil || !ok {
		return 0, err
	}
	o, _ := API.Get(v, APIID) // without one, all are made
	have := o.Spec
	ca := n.config.Machine.CA
	if !n.config.Machine.Type.ControlPlane() {
		return c.worker(ctx, v, n, have)
	}
	now := c.now()
	serving, err := keep(have.Serving, ca, n.api(now))
	if err != nil {
		return 0, err
	}
	if serving, err = chained(serving, ca, n.config.Machine.AcceptedCAs); err != nil {
		return 0, err
	}
	return renewal(now, serving.Crt), API.Put(v, APIID, APISpec{CA: n.config.Machine.TrustedCAs(), Serving: serving})
}

// worker keeps the certificate while it is valid, and otherwise requests
// another one. A certificate that is only due for renewal is used meanwhile.
func (c *APIController) worker(ctx context.Context, v resource.View, n node, have APISpec) (time.Duration, error) {
	ca, now := config.CertKey{Crt: n.config.Machine.CA.Crt}, c.now()
	want, trusted := n.worker(now), n.config.Machine.TrustedCAs()
	authorities := append([]config.CertKey{ca}, n.config.Machine.AcceptedCAs...)
	if len(have.Serving.Crt) == 0 {
		have.Serving = c.stored.read(v, now, authorities...)
	}
	var present config.CertKey
	cert, err := pki.ParseCert(have.Serving.Crt)
	// The certificate of an earlier boot, or of a former authority that is still accepted, is
	// used until there is a better one, even if it has a name or an address that the node had
	// then.
	if err == nil && signedByAny(cert, authorities...) {
		present = have.Serving
		if err := API.Put(v, APIID, APISpec{CA: trusted, Serving: have.Serving}); err != nil {
			return 0, err
		}
	}
	good := err == nil && signedBy(cert, ca)
	if !good || !fits(cert, ca, want) || !pki.IsWorker(cert) {
		if !good { // otherwise the key stays: certificate and key are two files, see keep
			if have.Serving.Key, err = pki.NewKey(pki.Ed25519); err != nil {
				return 0, err
			}
		}
		have.Serving.Crt, err = c.ask(ctx, n, controlPlanes(balancer.APIServers.List(v)), present, have.Serving.Key, want)
		if err != nil {
			return 0, laterWith(err, cert, good && stillFits(cert, ca, want))
		}
		v.Log().Info("a control plane signed the certificate of the machine API")
		if err := API.Put(v, APIID, APISpec{CA: trusted, Serving: have.Serving}); err != nil {
			return 0, err
		}
	}
	if !c.stored.write(v, have.Serving) {
		return keepAgain, nil
	}
	return renewal(now, have.Serving.Crt), nil
}

// stillFits is fits for a certificate that is due for renewal, and hasn't expired yet.
func stillFits(cert *x509.Certificate, ca config.CertKey, want pki.Leaf) bool {
	now := want.Now
	want.Now = cert.NotBefore
	return now.Before(cert.NotAfter) && fits(cert, ca, want)
}

// laterWith is the pause before the next request: there are months for a renewal.
func laterWith(err error, cert *x509.Certificate, good bool) error {
	if !good {
		return resource.RetryIn(err, askAgain)
	}
	err = fmt.Errorf("renew the certificate of the machine API, which expires on %s: %w", cert.NotAfter.Format(time.DateOnly), err)
	return resource.RetryIn(err, checkAgainMin)
}

// worker is what trustd signs for a node: its name, and the node's address, from
// which it connects. Further names (machine.certSANs) are for control planes.
func (n node) worker(now time.Time) pki.Leaf {
	return pki.Leaf{CN: n.hostname, DNS: []string{n.hostname, "localhost"}, IPs: append([]netip.Addr{n.primary}, loopback...), Server: true, Now: now}
}

// api has all names of this node's machine API: those of the node and, on a
// control plane, those of the cluster's endpoint.
func (n node) api(now time.Time) pki.Leaf {
	leaf := pki.Leaf{CN: n.hostname, Now: now}
	addHosts(&leaf, n.config.Machine.CertSANs)
	n.addEndpoint(&leaf)
	return n.server(leaf)
}

const (
	// apiFile is where a worker stores the certificate of its machine API, with the key.
	apiFile = "machine-api.pem"
	// keepAgain is how often to check whether STATE is mounted: a new disk is
	// prepared within seconds.
	keepAgain = 5 * time.Second
)

// certFile is a certificate and its key, in one file so that they always match.
type certFile struct {
	path   string
	ready  func() bool // whether it can be written
	logged string      // why it wasn't used
}

// read returns the pair that an earlier boot has stored, if it is of one of these authorities and valid now.
func (f *certFile) read(v resource.View, now time.Time, authorities ...config.CertKey) (pair config.CertKey) {
	data, err := os.ReadFile(f.path)
	if err == nil {
		pair, err = usable(data, now, authorities)
	}
	if boot.IgnoreMissing(err) != nil && err.Error() != f.logged {
		f.logged = err.Error()
		v.Log().Info(fmt.Sprintf("the stored certificate of the machine API, %s, isn't used: %v", f.path, err))
	}
	return pair
}

func usable(data []byte, now time.Time, authorities []config.CertKey) (none config.CertKey, err error) {
	if _, err := tls.X509KeyPair(data, data); err != nil {
		return none, err
	}
	block, key := pem.Decode(data)
	pair := config.CertKey{Crt: pem.EncodeToMemory(block), Key: key}
	cert, err := pki.ParseCert(pair.Crt)
	switch {
	case err != nil: // the key comes first: write didn't write this file
		return none, err
	case !signedByAny(cert, authorities...):
		return none, errors.New("it is of another authority")
	case now.After(cert.NotAfter):
		return none, fmt.Errorf("it expired on %s", cert.NotAfter.Format(time.DateOnly))
	}
	return pair, nil
}

// write stores a pair, and returns false if it can't be stored yet. After an error the
// node continues without the file: it requests a certificate again at the next boot.
func (f *certFile) write(v resource.View, pair config.CertKey) bool {
	if !f.ready() {
		return false
	}
	data := slices.Concat([]byte(pair.Crt), []byte(pair.Key))
	if have, err := os.ReadFile(f.path); err == nil && bytes.Equal(have, data) {
		return true
	}
	if err := boot.WriteFile(f.path, data, fileMode); err != nil {
		v.Log().Warn(fmt.Sprintf("store the certificate of the machine API: %v", err))
	}
	return true
}

// SignPurpose is that of the proof with which a kubelet's client certificate asks for one of
// the machine API.
const SignPurpose = "certificate of the machine API"

// RenewPurpose is that of the proof with which a node's present certificate of the machine API asks
// for the next one.
const RenewPurpose = "renewal of the certificate of the machine API"

// Prove proves that this machine has made a message, with the key of its machine API.
func Prove(r resource.Reader, purpose string, message []byte) ([]byte, error) {
	own, err := API.Get(r, APIID)
	if err != nil {
		return nil, err
	}
	return pki.Prove(own.Spec.Serving.Crt, own.Spec.Serving.Key, purpose, message)
}

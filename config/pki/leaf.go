package pki

import (
	"cmp"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// Leaf is the content of a certificate.
type Leaf struct {
	CN       string
	Orgs     []string
	Units    []string // such as WorkerUnit
	DNS      []string
	IPs      []netip.Addr
	Server   bool          // usable by a server; needs DNS or IPs
	Client   bool          // usable by a client
	Validity time.Duration // default LeafValidity
	Now      time.Time     // required
}

// WorkerUnit is the organisational unit of certificates of workers' machine APIs: no client
// takes such a server for a control plane.
const WorkerUnit = "worker"

// IsWorker reports whether a certificate is of a worker's machine API.
func IsWorker(cert *x509.Certificate) bool {
	return slices.Contains(cert.Subject.OrganizationalUnit, WorkerUnit)
}

// Issue makes a fresh key and a certificate for it. The validity of the leaf is
// always within that of its authority.
func (ca CA) Issue(leaf Leaf) (certPEM, keyPEM []byte, err error) {
	authority, err := ParseCert(ca.Cert)
	// Clients of an Ed25519 authority support it. All others have leaves of ECDSA.
	alg := ECDSA
	if err == nil && authority.PublicKeyAlgorithm == x509.Ed25519 {
		alg = Ed25519
	}
	key, keyPEM, unmade := newKey(alg)
	if err = cmp.Or(err, unmade); err != nil {
		return nil, nil, fmt.Errorf("issue certificate %q: %w", leaf.CN, err)
	}
	certPEM, err = ca.Sign(key.Public(), leaf)
	return certPEM, keyPEM, err
}

// Sign makes a certificate for a key that exists already.
func (ca CA) Sign(public crypto.PublicKey, leaf Leaf) (certPEM []byte, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("issue certificate %q: %w", leaf.CN, err)
		}
	}()
	parent, signer, err := ca.Parse()
	if err != nil {
		return nil, err
	}
	if signer == nil {
		return nil, errors.New("the authority has no private key")
	}
	template, err := leaf.template(parent)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, signer)
	if err != nil {
		return nil, err
	}
	return EncodeCert(der), nil
}

func (leaf Leaf) template(parent *x509.Certificate) (*x509.Certificate, error) {
	if !leaf.Server && !leaf.Client {
		return nil, errors.New("neither for a server nor for a client")
	}
	if leaf.Server && len(leaf.DNS)+len(leaf.IPs) == 0 {
		return nil, errors.New("a server certificate needs a DNS name or an address")
	}
	notBefore, notAfter, err := window(leaf.Now, leaf.Validity, parent)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		Subject:               pkix.Name{CommonName: leaf.CN, Organization: leaf.Orgs, OrganizationalUnit: leaf.Units},
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
	}
	t.DNSNames, t.IPAddresses = leaf.names()
	if leaf.Server {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	if leaf.Client {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	return t, nil
}

// names are those of the leaf, without duplicates.
func (leaf Leaf) names() (dns []string, ips []net.IP) {
	for _, name := range leaf.DNS {
		if name != "" && !slices.Contains(dns, name) {
			dns = append(dns, name)
		}
	}
	seen := map[netip.Addr]bool{}
	for _, ip := range leaf.IPs {
		ip = ip.Unmap().WithZone("") // a SAN has no zone
		if ip.IsValid() && !seen[ip] {
			seen[ip] = true
			ips = append(ips, net.IP(ip.AsSlice()))
		}
	}
	return dns, ips
}

// window is the validity of a leaf. A clock before the start of the authority
// is wrong, so the start of the authority is used as the present. Otherwise the
// node would issue certificates that expire too early, or never verify.
func window(now time.Time, validity time.Duration, parent *x509.Certificate) (notBefore, notAfter time.Time, err error) {
	if now.IsZero() {
		return now, now, errors.New("no time given")
	}
	now = slices.MaxFunc([]time.Time{now, parent.NotBefore}, time.Time.Compare)
	if !now.Before(parent.NotAfter) {
		return now, now, fmt.Errorf("authority %q has expired on %s", parent.Subject, parent.NotAfter.Format(time.DateOnly))
	}
	began, ends := now.Add(-ClockSkew).UTC().Truncate(time.Second), now.Add(cmp.Or(validity, LeafValidity)).UTC().Truncate(time.Second)
	notBefore = slices.MaxFunc([]time.Time{began, parent.NotBefore}, time.Time.Compare)
	return notBefore, slices.MinFunc([]time.Time{ends, parent.NotAfter}, time.Time.Compare), nil
}

// NewRequest makes a certificate signing request (PKCS #10) for a key that
// exists already, with the name, organisations, DNS names and addresses of
// leaf. The authority decides on usage and validity.
func NewRequest(keyPEM []byte, leaf Leaf) ([]byte, error) {
	key, err := ParseKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("request certificate %q: %w", leaf.CN, err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: leaf.CN, Organization: leaf.Orgs}}
	template.DNSNames, template.IPAddresses = leaf.names()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, fmt.Errorf("request certificate %q: %w", leaf.CN, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: der}), nil
}

const requestType = "CERTIFICATE REQUEST"

// ParseRequest reads the first request of PEM text, and checks that the
// requester has the key.
func ParseRequest(text []byte) (*x509.CertificateRequest, error) {
	return first(text, "certificate request", func(der []byte) (*x509.CertificateRequest, error) {
		request, err := x509.ParseCertificateRequest(der)
		if err == nil {
			err = request.CheckSignature()
		}
		return request, err
	}, requestType, "NEW "+requestType) // the second is the type that older openssl writes
}

// Package pki makes the certificates of a cluster: the authorities that the
// configuration carries, and the short-lived leaves that nodes issue from them.
//
// Everything is PEM text in and out, because that is what the configuration,
// Kubernetes and etcd hold. Time is always passed in: a node's clock may be
// wrong when it issues its first certificates, and the rules for that are here,
// in one place (see window).
package pki

import (
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	day = 24 * time.Hour

	// CAValidity is the lifetime of authorities. Kubernetes' own tools use ten
	// years, and the aggregator's authority needs them too.
	CAValidity = 3650 * day
	// LeafValidity is for certificates that nodes issue to themselves and renew. A
	// node that was off for a shorter time recovers by itself.
	LeafValidity = 365 * day
	// RenewBefore is the remaining validity at which a leaf is replaced: a third
	// of LeafValidity leaves months to notice a broken renewal. A kubelet, which has its certificate replaced,
	// would ask for another one by itself after 70 % of its validity at the earliest.
	RenewBefore = 120 * day
	// ClockSkew is how far NotBefore lies in the past: a hardware clock that has
	// local time is up to 14 hours off, rounded up to a day.
	ClockSkew = day
)

// CA is a certificate authority: PEM text of its certificate and private key.
// Key is empty if the authority is only trusted.
type CA struct {
	Cert, Key []byte
}

// Algorithm is the kind of a new key.
type Algorithm int

const (
	ECDSA   Algorithm = iota // P-256: what all of Kubernetes and etcd accept
	Ed25519                  // for our own programs
	RSA                      // for programs that support nothing else
)

// rsaBits is as strong as P-256 (NIST SP 800-57 part 1, table 2).
const rsaBits = 3072

// Names of the authorities. They distinguish Kubernetes' certificates from
// etcd's.
var (
	MachineName    = pkix.Name{Organization: []string{"garboard"}}
	KubernetesName = pkix.Name{CommonName: "kubernetes", Organization: []string{"kubernetes"}}
	EtcdName       = pkix.Name{CommonName: "etcd", Organization: []string{"etcd"}}
	AggregatorName = pkix.Name{CommonName: "front-proxy"}
)

// NewMachineCA makes the authority of the machine API.
func NewMachineCA(now time.Time) (CA, error) { return NewCA(Ed25519, MachineName, now, CAValidity) }

// NewKubernetesCA makes the cluster's authority.
func NewKubernetesCA(now time.Time) (CA, error) { return NewCA(ECDSA, KubernetesName, now, CAValidity) }

// NewEtcdCA makes etcd's authority.
func NewEtcdCA(now time.Time) (CA, error) { return NewCA(ECDSA, EtcdName, now, CAValidity) }

// NewAggregatorCA makes the authority of the apiserver as a client of extension
// API servers.
func NewAggregatorCA(now time.Time) (CA, error) { return NewCA(ECDSA, AggregatorName, now, CAValidity) }

// NewCA makes a self-signed authority.
func NewCA(alg Algorithm, subject pkix.Name, now time.Time, validity time.Duration) (CA, error) {
	key, keyPEM, err := newKey(alg)
	if err != nil {
		return CA{}, fmt.Errorf("make authority %s: %w", subject, err)
	}
	template := &x509.Certificate{
		Subject:               subject,
		NotBefore:             now.Add(-ClockSkew).UTC().Truncate(time.Second),
		NotAfter:              now.Add(validity).UTC().Truncate(time.Second),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return CA{}, fmt.Errorf("make authority %s: %w", subject, err)
	}
	return CA{Cert: EncodeCert(der), Key: keyPEM}, nil
}

// Parse returns certificate and key after it has checked that they are an
// authority and belong together. The key is nil if the CA has none.
func (ca CA) Parse() (*x509.Certificate, crypto.Signer, error) {
	cert, err := ParseCert(ca.Cert)
	if err != nil {
		return nil, nil, err
	}
	if !cert.IsCA {
		return nil, nil, fmt.Errorf("certificate %q is not a CA certificate", cert.Subject)
	}
	if len(ca.Key) == 0 {
		return cert, nil, nil
	}
	key, err := ParseKey(ca.Key)
	if err != nil {
		return nil, nil, err
	}
	if pub, ok := cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(key.Public()) {
		return nil, nil, fmt.Errorf("private key doesn't belong to certificate %q", cert.Subject)
	}
	return cert, key, nil
}

// CrossSign makes another certificate of this authority, which an older one signs: clients
// that trust only the older one trust this authority with it.
func (ca CA) CrossSign(older CA) ([]byte, error) {
	cert, _, err := ca.Parse()
	parent, signer, bad := older.Parse()
	if err = cmp.Or(err, bad); err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: cert.Subject, NotBefore: cert.NotBefore, NotAfter: slices.MinFunc([]time.Time{cert.NotAfter, parent.NotAfter}, time.Time.Compare),
		KeyUsage: cert.KeyUsage, IsCA: true, BasicConstraintsValid: true,
		// Both authorities have the same name, so it isn't set by itself.
		SubjectKeyId: cert.SubjectKeyId, AuthorityKeyId: parent.SubjectKeyId,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, cert.PublicKey, signer)
	if err != nil {
		return nil, fmt.Errorf("sign authority %s by an older one: %w", cert.Subject, err)
	}
	return EncodeCert(der), nil
}

// NewKey makes the PEM text of a private key.
func NewKey(alg Algorithm) ([]byte, error) {
	_, text, err := newKey(alg)
	return text, err
}

// newKey makes a key, and its PEM text.
func newKey(alg Algorithm) (key crypto.Signer, text []byte, err error) {
	switch alg {
	case ECDSA:
		key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case Ed25519:
		_, key, err = ed25519.GenerateKey(rand.Reader)
	case RSA:
		key, err = rsa.GenerateKey(rand.Reader, rsaBits)
	default:
		err = errors.New("unknown key algorithm")
	}
	if err == nil {
		text, err = EncodeKey(key)
	}
	return key, text, err
}

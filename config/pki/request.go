package pki

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
)

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

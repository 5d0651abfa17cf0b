package pki

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
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
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != requestType && block.Type != "NEW "+requestType { // the type that older openssl writes
			continue
		}
		request, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("parse certificate request: %w", err)
		}
		if err := request.CheckSignature(); err != nil {
			return nil, fmt.Errorf("parse certificate request: %w", err)
		}
		return request, nil
	}
	return nil, errors.New("parse certificate request: no " + requestType + " block")
}

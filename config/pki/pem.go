package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
)

const certType, publicType = "CERTIFICATE", "PUBLIC KEY"

// minRSABits is the shortest RSA key that Go's TLS and Kubernetes accept.
const minRSABits = 2048

// EncodeCert is the PEM text of a DER certificate.
func EncodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: certType, Bytes: der})
}

// EncodeKey is the PEM text of a private key: SEC 1 for ECDSA, because older
// readers of Kubernetes' key files support only that, PKCS #8 for the rest.
func EncodeKey(key crypto.Signer) ([]byte, error) {
	kind := "PRIVATE KEY"
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if key, ok := key.(*ecdsa.PrivateKey); ok {
		kind = "EC PRIVATE KEY"
		der, err = x509.MarshalECPrivateKey(key)
	}
	if err != nil {
		return nil, fmt.Errorf("encode private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), nil
}

// EncodePublicKey is the PEM text (PKIX) of a private key's public half, or of a public key.
func EncodePublicKey(keyPEM []byte) ([]byte, error) {
	if block, _ := pem.Decode(keyPEM); block != nil && block.Type == publicType {
		if _, err := x509.ParsePKIXPublicKey(block.Bytes); err != nil {
			return nil, fmt.Errorf("parse public key: %w", err)
		}
		return pem.EncodeToMemory(block), nil
	}
	key, err := ParseKey(keyPEM)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, fmt.Errorf("encode public key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: publicType, Bytes: der}), nil
}

// first parses the first block of PEM text that has one of the types.
func first[T any](text []byte, what string, parse func(der []byte) (T, error), types ...string) (found T, err error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if !slices.Contains(types, block.Type) {
			continue
		}
		one, err := parse(block.Bytes)
		if err != nil {
			return found, fmt.Errorf("parse %s: %w", what, err)
		}
		return one, nil
	}
	return found, fmt.Errorf("parse %s: no %s block", what, types[0])
}

// ParseCert reads the first certificate of PEM text.
func ParseCert(text []byte) (*x509.Certificate, error) {
	return first(text, "certificate", x509.ParseCertificate, certType)
}

// Pool has the certificates of PEM text.
func Pool(text []byte) *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

// SignedBy reports whether a certificate is of one of the authorities in PEM text, whatever the time is.
func SignedBy(cert *x509.Certificate, authorities []byte) bool {
	for block, rest := pem.Decode(authorities); block != nil; block, rest = pem.Decode(rest) {
		if authority, err := x509.ParseCertificate(block.Bytes); err == nil && cert.CheckSignatureFrom(authority) == nil {
			return true
		}
	}
	return false
}

// IssuedBy reports whether a certificate is of the authority that issues: the first one of PEM text.
func IssuedBy(cert *x509.Certificate, authority []byte) bool {
	block, _ := pem.Decode(authority)
	return block != nil && SignedBy(cert, pem.EncodeToMemory(block))
}

// ParsePublicKey reads the first public key of PEM text (RFC 7468, section 13): RSA, ECDSA or Ed25519.
func ParsePublicKey(text []byte) (crypto.PublicKey, error) {
	return first(text, "public key", x509.ParsePKIXPublicKey, publicType)
}

// ReleaseKey reads a public Ed25519 key out of the base64 of its PEM text.
func ReleaseKey(line string) (ed25519.PublicKey, error) {
	key, err := ParsePublicKey([]byte("-----BEGIN PUBLIC KEY-----\n" + line + "\n-----END PUBLIC KEY-----\n"))
	public, ok := key.(ed25519.PublicKey)
	if err == nil && !ok {
		err = errors.New("it is no Ed25519 key")
	}
	return public, err
}

// ParseKey reads the first private key of PEM text: RSA, ECDSA or Ed25519, in
// any of the three usual encodings. Errors never hold parts of the key.
func ParseKey(text []byte) (crypto.Signer, error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		var key any
		var err error
		switch block.Type {
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		case "RSA PRIVATE KEY":
			key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
		case "PRIVATE KEY", "ED25519 PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		case "ENCRYPTED PRIVATE KEY":
			return nil, errors.New("parse private key: encrypted keys are not supported")
		default: // such as EC PARAMETERS before an EC key
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("parse private key: malformed %s block", block.Type)
		}
		return usable(key)
	}
	return nil, errors.New("parse private key: no PRIVATE KEY block")
}

func usable(key any) (crypto.Signer, error) {
	switch key := key.(type) {
	case *rsa.PrivateKey:
		if bits := key.N.BitLen(); bits < minRSABits {
			return nil, fmt.Errorf("parse private key: RSA of %d bits is too short, %d are needed", bits, minRSABits)
		}
		return key, nil
	case *ecdsa.PrivateKey:
		return key, nil
	case ed25519.PrivateKey:
		return key, nil
	}
	return nil, fmt.Errorf("parse private key: unknown kind %T", key)
}

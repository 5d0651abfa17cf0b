package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// A Proof shows that whoever holds the key of a certificate has made a message. It is sent
// as JSON.
type Proof struct {
	Certificate []byte `json:"certificate"` // PEM
	Signature   []byte `json:"signature"`
}

// MaxProof is more than a proof has, in bytes.
const MaxProof = 8 << 10

// proven is what is signed. The purpose keeps the proof of one thing from being one of another.
func proven(purpose string, message []byte) []byte {
	sum := sha256.Sum256(message)
	return append([]byte("garboard proof 1\x00"+purpose+"\x00"), sum[:]...)
}

// Prove signs a message.
func Prove(certPEM, keyPEM []byte, purpose string, message []byte) ([]byte, error) {
	key, err := ParseKey(keyPEM)
	if err != nil {
		return nil, err
	}
	text, options := proven(purpose, message), crypto.SignerOpts(crypto.Hash(0))
	if _, pure := key.(ed25519.PrivateKey); !pure {
		sum := sha256.Sum256(text)
		text, options = sum[:], crypto.SHA256
	}
	signature, err := key.Sign(rand.Reader, text, options)
	if err != nil {
		return nil, fmt.Errorf("sign for the purpose %q: %w", purpose, err)
	}
	return json.Marshal(Proof{certPEM, signature})
}

// CheckProof returns the certificate of a proof that the authorities (PEM) accept now.
func CheckProof(proof, authorities []byte, purpose string, message []byte, now time.Time) (*x509.Certificate, error) {
	var p Proof
	if len(proof) > MaxProof {
		return nil, fmt.Errorf("the proof has %d bytes, of at most %d", len(proof), MaxProof)
	}
	if err := json.Unmarshal(proof, &p); err != nil {
		return nil, errors.New("the proof isn't one")
	}
	cert, err := ParseCert(p.Certificate)
	if err != nil {
		return nil, fmt.Errorf("the proof: %w", err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: Pool(authorities), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return nil, fmt.Errorf("the proof: %w", err)
	}
	algorithm := x509.PureEd25519
	if _, is := cert.PublicKey.(*ecdsa.PublicKey); is {
		algorithm = x509.ECDSAWithSHA256
	}
	if err := cert.CheckSignature(algorithm, proven(purpose, message), p.Signature); err != nil {
		return nil, fmt.Errorf("the proof of %q: %w", cert.Subject.CommonName, err)
	}
	return cert, nil
}

// KeyID is the hash of a public key (SHA-256 of its SubjectPublicKeyInfo).
func KeyID(public crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sha256.Sum256(der)), nil
}

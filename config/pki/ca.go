// Package pki makes the certificates of a cluster.
package pki

// CA is a certificate authority: PEM text of its certificate and private key.
// Key is empty where the authority is only trusted.
type CA struct {
	Cert, Key []byte
}

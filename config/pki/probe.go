package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
)

// Probe checks the certificate of a TLS server. It ends the handshake before it would have
// to show a certificate, and sends nothing.
func Probe(ctx context.Context, server string, minVersion uint16, check func(*x509.Certificate) error) error {
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion:         minVersion,
		InsecureSkipVerify: true, // check does it
		VerifyConnection:   func(c tls.ConnectionState) error { return check(c.PeerCertificates[0]) },
	}}
	conn, err := dialer.DialContext(ctx, "tcp", server)
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err
}

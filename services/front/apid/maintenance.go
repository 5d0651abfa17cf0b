package apid

import (
	"cmp"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config/pki"
)

// paramPinned is the kernel parameter that closes maintenance mode to all but the
// owner of a certificate: its SHA-256, or that of its authority.
const paramPinned = "garboard.maintenance.ca"

const (
	selfName = "garboard-maintenance"
	// selfSerial: there is no list of serial numbers.
	selfSerial = 1
)

// self is the certificate of the API while the node has no configuration, or nobody has
// signed another one. It is kept in memory, for one boot; a person compares its fingerprint.
type self struct {
	cert, key   []byte // PEM
	fingerprint string // as people compare them: AB:CD:…
}

// newSelf makes the certificate. It is valid from the oldest to the newest time that a
// wrong clock could show: a client that compares the fingerprint needs no date.
func newSelf(now time.Time) (self, error) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return self{}, fmt.Errorf("make a self-signed certificate of the API: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(selfSerial),
		Subject:      pkix.Name{CommonName: selfName},
		NotBefore:    boot.Built().UTC(),
		NotAfter:     now.Add(pki.CAValidity).UTC(),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{selfName, "localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	keyPEM, bad := pki.EncodeKey(key)
	if err = cmp.Or(err, bad); err != nil {
		return self{}, fmt.Errorf("make a self-signed certificate of the API: %w", err)
	}
	return self{cert: pki.EncodeCert(der), key: keyPEM, fingerprint: api.ShownFingerprint(der)}, nil
}

// parsePinned reads the kernel parameter. With an error, maintenance mode must stay
// closed, not open to all.
func parsePinned(text string) (string, error) {
	plain, err := api.ParseFingerprint(text)
	if err != nil {
		return "", fmt.Errorf("kernel parameter %s: %w; maintenance mode stays closed", paramPinned, err)
	}
	return plain, nil
}

package server

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config/pki"
)

const (
	secret   = 0o600
	keyBytes = 32
	validity = 10 * 365 * 24 * time.Hour
)

// Key is that of a directory. It is made if there is none.
func Key(dir string) ([]byte, error) {
	path := filepath.Join(dir, "key")
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, keyBytes)
		_, _ = rand.Read(key) // it never fails
		return key, boot.WriteFile(path, key, secret)
	}
	if err == nil && len(key) != keyBytes {
		err = fmt.Errorf("%s has %d bytes, and must have %d: restore it", path, len(key), keyBytes)
	}
	return key, err
}

// Certificate is a new one for a name or an address, of the directory's own authority, which is made if there is none.
func Certificate(dir, name string, now time.Time) (tls.Certificate, error) {
	if name == "" {
		return tls.Certificate{}, errors.New("the server's certificate needs its name or address (-name)")
	}
	ca, err := authority(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), now)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf := pki.Leaf{CN: name, DNS: []string{name}, Server: true, Validity: validity, Now: now}
	if addr, err := netip.ParseAddr(name); err == nil {
		leaf.DNS, leaf.IPs = nil, []netip.Addr{addr}
	}
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(cert, key)
}

func authority(certFile, keyFile string, now time.Time) (ca pki.CA, err error) {
	if ca.Cert, err = os.ReadFile(certFile); err == nil {
		ca.Key, err = os.ReadFile(keyFile)
		return ca, err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return ca, err
	}
	if ca, err = pki.NewCA(pki.ECDSA, pkix.Name{CommonName: "garboard kms"}, now, validity); err != nil {
		return ca, err
	}
	// The certificate comes last: with it, there is an authority.
	if err := boot.WriteFile(keyFile, ca.Key, secret); err != nil {
		return ca, err
	}
	return ca, boot.WriteFile(certFile, ca.Cert, 0o644)
}

package pki

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// A proof is of one certificate's key, for one purpose and one message.
func TestProof(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, made := range map[string]func(time.Time) (CA, error){"Ed25519": NewMachineCA, "ECDSA": NewKubernetesCA} {
		ca, err := made(now)
		if err != nil {
			t.Fatal(err)
		}
		other, err := made(now)
		if err != nil {
			t.Fatal(err)
		}
		leaf := Leaf{CN: "w", IPs: []netip.Addr{netip.MustParseAddr("10.5.0.3")}, Server: true, Validity: time.Hour, Now: now}
		crt, key, err := ca.Issue(leaf)
		if err != nil {
			t.Fatal(err)
		}
		_, foreign, err := ca.Issue(leaf)
		if err != nil {
			t.Fatal(err)
		}
		proof, err := Prove(crt, key, "to join", []byte("message"))
		if err != nil {
			t.Fatal(err)
		}
		cert, err := CheckProof(proof, ca.Cert, "to join", []byte("message"), now)
		if err != nil || cert.Subject.CommonName != "w" {
			t.Errorf("%s: %v, %v", name, cert, err)
		}
		forged, err := Prove(crt, foreign, "to join", []byte("message"))
		if err != nil {
			t.Fatal(err)
		}
		for what, check := range map[string]func() error{
			"another message":   func() error { _, err := CheckProof(proof, ca.Cert, "to join", []byte("massage"), now); return err },
			"another purpose":   func() error { _, err := CheckProof(proof, ca.Cert, "to leave", []byte("message"), now); return err },
			"another authority": func() error { _, err := CheckProof(proof, other.Cert, "to join", []byte("message"), now); return err },
			"no authority":      func() error { _, err := CheckProof(proof, nil, "to join", []byte("message"), now); return err },
			"another key":       func() error { _, err := CheckProof(forged, ca.Cert, "to join", []byte("message"), now); return err },
			"expired": func() error {
				_, err := CheckProof(proof, ca.Cert, "to join", []byte("message"), now.Add(2*time.Hour))
				return err
			},
			"no proof": func() error { _, err := CheckProof(nil, ca.Cert, "to join", []byte("message"), now); return err },
			"too long": func() error {
				_, err := CheckProof([]byte(strings.Repeat("{", MaxProof+1)), ca.Cert, "to join", []byte("message"), now)
				return err
			},
		} {
			if check() == nil {
				t.Errorf("%s: %s is accepted", name, what)
			}
		}
	}
}

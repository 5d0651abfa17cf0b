package pki

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// S-151, S-152: each kind of key below each kind of authority.
func TestRequest(t *testing.T) {
	for name, alg := range map[string]Algorithm{"ECDSA": ECDSA, "Ed25519": Ed25519, "RSA": RSA} {
		key, err := NewKey(alg)
		if err != nil {
			t.Fatal(err)
		}
		text, err := NewRequest(key, Leaf{CN: "admin", Orgs: []string{"os:admin"}, DNS: []string{"a.example.org"}, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::ffff:127.0.0.1")}})
		if err != nil {
			t.Fatal(err)
		}
		request, err := ParseRequest(text)
		if err != nil {
			t.Fatal(err)
		}
		if s := request.Subject; s.CommonName != "admin" || !slices.Equal(s.Organization, []string{"os:admin"}) || len(request.IPAddresses) != 1 || !slices.Equal(request.DNSNames, []string{"a.example.org"}) {
			t.Errorf("%s: %+v", name, request)
		}
		leaf := Leaf{CN: "admin", Orgs: []string{"os:admin"}, DNS: request.DNSNames, Client: true, Now: now}
		ca := newCA(t, NewMachineCA)
		cert, err := ca.Sign(request.PublicKey, leaf)
		if err != nil {
			t.Fatal(err)
		}
		verifyWithOpenSSL(t, ca.Cert, cert)
		parsed, err := ParseCert(cert)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca.Cert)
		if _, err := parsed.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// verifyWithOpenSSL checks with a second implementation, if it is installed.
func verifyWithOpenSSL(t *testing.T, ca, cert []byte) {
	t.Helper()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		return
	}
	dir := t.TempDir()
	for name, data := range map[string][]byte{"ca.crt": ca, "leaf.crt": cert} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(openssl, "verify", "-x509_strict", "-no_check_time", "-purpose", "sslclient", "-CAfile", "ca.crt", "leaf.crt")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("openssl verify: %v\n%s", err, out)
	}
}

// A request with names only is for a server.
func TestRequestForServer(t *testing.T) {
	key, err := NewKey(ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	text, err := NewRequest(key, Leaf{CN: "node", DNS: []string{"node"}})
	if err != nil {
		t.Fatal(err)
	}
	request, err := ParseRequest(bytes.ReplaceAll(text, []byte("CERTIFICATE REQUEST"), []byte("NEW CERTIFICATE REQUEST")))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(request.DNSNames, []string{"node"}) {
		t.Errorf("%+v", request)
	}
}

func TestParseRequestRefuses(t *testing.T) {
	key, err := NewKey(ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	text, err := NewRequest(key, Leaf{CN: "node"})
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	block.Bytes[len(block.Bytes)-1] ^= 1 // in the signature
	for want, text := range map[string][]byte{
		"no CERTIFICATE REQUEST block": key,
		"verification failure":         pem.EncodeToMemory(block),
		"truncated":                    pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: []byte{0x30, 1}}),
	} {
		if _, err := ParseRequest(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

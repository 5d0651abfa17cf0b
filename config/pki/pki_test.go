package pki

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func newCA(t *testing.T, make func(time.Time) (CA, error)) CA {
	t.Helper()
	ca, err := make(now)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// rsaCA is an authority as older installations have it.
func rsaCA(t *testing.T, bits int) CA {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "old"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: now, NotAfter: now.Add(CAValidity),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return CA{Cert: EncodeCert(der), Key: pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})}
}

// S-155, S-156
func TestAuthorities(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(time.Time) (CA, error)
		alg  x509.PublicKeyAlgorithm
		cn   string
	}{
		{"machine", NewMachineCA, x509.Ed25519, ""},
		{"kubernetes", NewKubernetesCA, x509.ECDSA, "kubernetes"},
		{"etcd", NewEtcdCA, x509.ECDSA, "etcd"},
		{"aggregator", NewAggregatorCA, x509.ECDSA, "front-proxy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ca := newCA(t, tt.make)
			cert, key, err := ca.Parse()
			if err != nil || key == nil {
				t.Fatal(key, err)
			}
			if cert.PublicKeyAlgorithm != tt.alg || cert.Subject.CommonName != tt.cn {
				t.Errorf("got %s, CN %q", cert.PublicKeyAlgorithm, cert.Subject.CommonName)
			}
			if cert.NotBefore != now.Add(-ClockSkew) || cert.NotAfter != now.Add(CAValidity) {
				t.Errorf("valid from %s to %s", cert.NotBefore, cert.NotAfter)
			}
			handshake(t, ca)
		})
	}
	t.Run("RSA accepted", func(t *testing.T) { handshake(t, rsaCA(t, 2048)) })
	t.Run("RSA made", func(t *testing.T) {
		ca, err := NewCA(RSA, EtcdName, now, day)
		if err != nil {
			t.Fatal(err)
		}
		if cert, _, err := ca.Parse(); err != nil || cert.PublicKeyAlgorithm != x509.RSA || cert.NotAfter != now.Add(day) {
			t.Errorf("%v, %v", cert, err)
		}
		handshake(t, ca)
	})
}

// handshake checks that crypto/tls accepts a server's and a client's leaf, by
// name and by address.
func handshake(t *testing.T, ca CA) {
	t.Helper()
	server := pair(t, ca, Leaf{CN: "server", DNS: []string{"node", "node", ""}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("::ffff:10.0.0.2")}, Server: true, Now: now})
	client := pair(t, ca, Leaf{CN: "admin", Orgs: []string{"os:admin"}, Client: true, Now: now})
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert)
	clock := func() time.Time { return now }
	for _, name := range []string{"node", "10.0.0.2"} {
		a, b := net.Pipe()
		done := make(chan error, 1)
		srv := tls.Server(a, &tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert, Time: clock, SessionTicketsDisabled: true})
		go func() { done <- srv.Handshake() }()
		cli := tls.Client(b, &tls.Config{Certificates: []tls.Certificate{client}, RootCAs: roots, ServerName: name, Time: clock})
		if err := cli.Handshake(); err != nil {
			t.Errorf("client, %s: %v", name, err)
		}
		if err := <-done; err != nil {
			t.Errorf("server, %s: %v", name, err)
		}
		a.Close()
		b.Close()
	}
	leaf := server.Leaf
	if len(leaf.DNSNames) != 1 || len(leaf.IPAddresses) != 1 {
		t.Errorf("duplicates in %v %v", leaf.DNSNames, leaf.IPAddresses)
	}
}

func pair(t *testing.T, ca CA, leaf Leaf) tls.Certificate {
	t.Helper()
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	p, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLeafWindow(t *testing.T) {
	ca := newCA(t, NewEtcdCA)
	caCert, _, err := ca.Parse()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name       string
		now        time.Time
		validity   time.Duration
		start, end time.Time
	}{
		{"default", now.Add(10 * day), 0, now.Add(9 * day), now.Add(10*day + LeafValidity)},
		{"not before the authority", now, day, caCert.NotBefore, now.Add(day)},
		{"clock behind the authority", time.Unix(0, 0), day, caCert.NotBefore, caCert.NotBefore.Add(day)},
		{"not after the authority", now.Add(CAValidity - day), 30 * day, now.Add(CAValidity - 2*day), caCert.NotAfter},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leaf := pair(t, ca, Leaf{CN: "x", Client: true, Validity: tt.validity, Now: tt.now}).Leaf
			if !leaf.NotBefore.Equal(tt.start) || !leaf.NotAfter.Equal(tt.end) {
				t.Errorf("from %s to %s, want %s to %s", leaf.NotBefore, leaf.NotAfter, tt.start, tt.end)
			}
		})
	}
}

func TestIssueRefuses(t *testing.T) {
	ca, other := newCA(t, NewEtcdCA), newCA(t, NewKubernetesCA)
	leafCert, leafKey, err := ca.Issue(Leaf{CN: "leaf", Client: true, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	ok := Leaf{CN: "x", Client: true, Now: now}
	for _, tt := range []struct {
		name string
		ca   CA
		leaf Leaf
		want string
	}{
		{"no usage", ca, Leaf{CN: "x", Now: now}, `issue certificate "x": neither for a server nor for a client`},
		{"no names", ca, Leaf{CN: "x", Server: true, Now: now}, "needs a DNS name or an address"},
		{"no time", ca, Leaf{CN: "x", Client: true}, "no time given"},
		{"no key", CA{Cert: ca.Cert}, ok, "the authority has no private key"},
		{"foreign key", CA{Cert: ca.Cert, Key: other.Key}, ok, "doesn't belong to certificate"},
		{"expired", ca, Leaf{CN: "x", Client: true, Now: now.Add(CAValidity)}, "has expired on 2036-04-28"},
		{"not an authority", CA{Cert: leafCert, Key: leafKey}, ok, "is not a CA certificate"},
		{"no certificate", CA{Cert: ca.Key, Key: ca.Key}, ok, "no CERTIFICATE block"},
		{"short RSA key", rsaCA(t, 1024), ok, "RSA of 1024 bits is too short"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := tt.ca.Issue(tt.leaf)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	key, err := NewKey(ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := EncodePublicKey(key)
	if err != nil || !bytes.HasPrefix(pub, []byte("-----BEGIN PUBLIC KEY-----")) {
		t.Fatalf("%s, %v", pub, err)
	}
	// openssl ecparam writes the curve's parameters first.
	withParams := append([]byte("-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"), key...)
	if _, err := ParseKey(withParams); err != nil {
		t.Error(err)
	}
	for text, want := range map[string]string{
		"": "no PRIVATE KEY block",
		"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n":                     "malformed PRIVATE KEY block",
		"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n": "encrypted keys are not supported",
	} {
		if _, err := ParseKey([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A client that knows only the older authority, and one that knows only the newer one, accept
// a server that shows the newer one as signed by the older one, though both have one name.
func TestCrossSign(t *testing.T) {
	older, err := NewMachineCA(now)
	if err != nil {
		t.Fatal(err)
	}
	newer, err := NewMachineCA(now)
	if err != nil {
		t.Fatal(err)
	}
	cross, err := newer.CrossSign(older)
	if err != nil {
		t.Fatal(err)
	}
	crt, _, err := newer.Issue(Leaf{CN: "n1", DNS: []string{"n1"}, Server: true, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := ParseCert(crt)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		root, shown []byte
		ok          bool
	}{
		"older": {older.Cert, cross, true}, "newer": {newer.Cert, cross, true}, "older, without": {older.Cert, nil, false},
	} {
		roots, shown := x509.NewCertPool(), x509.NewCertPool()
		roots.AppendCertsFromPEM(c.root)
		shown.AppendCertsFromPEM(c.shown)
		_, err := leaf.Verify(x509.VerifyOptions{DNSName: "n1", Roots: roots, Intermediates: shown, CurrentTime: now})
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSignedBy(t *testing.T) {
	t.Parallel()
	ours, former, other := newCA(t, NewEtcdCA), newCA(t, NewEtcdCA), newCA(t, NewMachineCA)
	crt, _, err := former.Issue(Leaf{CN: "node", Client: true, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ParseCert(crt)
	if err != nil {
		t.Fatal(err)
	}
	both := append(bytes.Clone(ours.Cert), former.Cert...)
	if !SignedBy(cert, both) || SignedBy(cert, ours.Cert) || SignedBy(cert, other.Cert) || SignedBy(cert, nil) {
		t.Error("a certificate is of the second of two authorities, and of no other")
	}
	if IssuedBy(cert, both) || !IssuedBy(cert, append(bytes.Clone(former.Cert), ours.Cert...)) || IssuedBy(cert, nil) {
		t.Error("the first of two authorities is the one that issues")
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: Pool(both), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		t.Error(err)
	}
}

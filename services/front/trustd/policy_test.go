package trustd

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
)

// S-157: a worker gets a certificate for a server, under its name and address, and
// nothing more, whichever way it asks.
func TestS157Signs(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "JSON": {connect.WithProtoJSON()}, "gRPC-Web": {connect.WithGRPCWeb()}} {
		crt, err := b.sign(t, token, request(t, pki.Ed25519, leaf()), options...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		cert := parse(t, crt)
		if cert.Subject.CommonName != "worker-1" || len(cert.Subject.Names) != 2 || !pki.IsWorker(cert) || cert.IsCA || cert.KeyUsage != x509.KeyUsageDigitalSignature ||
			!slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) || time.Until(cert.NotAfter) > pki.LeafValidity {
			t.Errorf("%s: %s, CA %v, %v, %v, until %s", name, cert.Subject, cert.IsCA, cert.KeyUsage, cert.ExtKeyUsage, cert.NotAfter)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(b.ca.Cert)
		for _, host := range []string{"worker-1", "localhost", "192.0.2.20", "127.0.0.1", "::1"} {
			if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: host}); err != nil {
				t.Errorf("%s, as %s: %v", name, host, err)
			}
		}
		if n := len(cert.DNSNames) + len(cert.IPAddresses); n != 5 {
			t.Errorf("%s: %v %v", name, cert.DNSNames, cert.IPAddresses)
		}
		if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
			t.Errorf("%s: a client's certificate, too", name)
		}
	}
}

// raw makes a request that pki can't.
func raw(t testing.TB, template x509.CertificateRequest) []byte {
	t.Helper()
	text, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.ParseKey(text)
	if err != nil {
		t.Fatal(err)
	}
	if len(template.IPAddresses) == 0 {
		template.IPAddresses = []net.IP{worker.AsSlice()}
	}
	if template.Subject.CommonName == "" {
		template.Subject.CommonName = "worker-1"
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &template, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// What a holder of the token might want besides.
func TestPolicyRefuses(t *testing.T) {
	t.Parallel()
	with := func(change func(*pki.Leaf)) []byte {
		l := leaf()
		change(&l)
		return request(t, pki.Ed25519, l)
	}
	ip := netip.MustParseAddr
	good := request(t, pki.Ed25519, leaf())
	forged := slices.Clone(good)
	if i := len(forged) - 50; forged[i] == 'A' { // in the signature
		forged[i] = 'B'
	} else {
		forged[i] = 'A'
	}
	ca, err := asn1.Marshal(struct{ CA bool }{true})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, peer string
		request    []byte
		want       string
	}{
		{"a role", "", with(func(l *pki.Leaf) { l.Orgs = []string{"os:admin"} }), `has no roles; the request is for "os:admin"`},
		{"another node's address", "", with(func(l *pki.Leaf) { l.IPs = append(l.IPs, ip("192.0.2.21")) }), "192.0.2.21 isn't the one that the request comes from, which is 192.0.2.20"},
		{"a control plane's address", "", with(func(l *pki.Leaf) { l.IPs = append(l.IPs, controlPlane) }), "192.0.2.2 isn't the one"},
		{"not its own address", "", with(func(l *pki.Leaf) { l.IPs = loopback }), "comes from 192.0.2.20, which isn't among its addresses"},
		{"no address", "", with(func(l *pki.Leaf) { l.IPs = nil }), "isn't among its addresses"},
		{"from elsewhere", "192.0.2.99", good, "192.0.2.20 isn't the one that the request comes from, which is 192.0.2.99"},
		{"from a control plane", "192.0.2.2", with(func(l *pki.Leaf) { l.IPs = []netip.Addr{controlPlane} }), "not through a load balancer"},
		{"from a pod", "10.244.3.7", with(func(l *pki.Leaf) { l.IPs = []netip.Addr{ip("10.244.3.7")} }), "of pods or services"},
		{"from itself", "127.0.0.1", with(func(l *pki.Leaf) { l.IPs = loopback }), "can't be a node's address"},
		{"link-local", "fe80::1", with(func(l *pki.Leaf) { l.IPs = []netip.Addr{ip("fe80::1")} }), "can't be a node's address"},
		{"the endpoint's name", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "Cluster.Example.org", nil }), "one of the control planes'"},
		{"a control plane's name", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "cp-1", nil }), "one of the control planes'"},
		{"the endpoint's name besides", "", with(func(l *pki.Leaf) { l.DNS = append(l.DNS, "cluster.example.org") }), `"cluster.example.org" isn't the node's, which is worker-1`},
		{"a wildcard", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "*.example.org", nil }), "isn't a host name"},
		{"an address as a name", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "192.0.2.2", nil }), "isn't a host name"},
		{"localhost", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "LocalHost", nil }), "isn't a host name"},
		{"a name that looks like a line of the log", "", with(func(l *pki.Leaf) { l.CN, l.DNS = "a\nlevel=INFO", nil }), `"a\nlevel=INFO" isn't a host name`},
		{"no name", "", with(func(l *pki.Leaf) { l.CN = "" }), `"" isn't a host name`},
		{"too long a name", "", with(func(l *pki.Leaf) { l.CN, l.DNS = strings.Repeat("a", 65), nil }), "isn't a host name"},
		{"RSA", "", request(t, pki.RSA, leaf()), "must be Ed25519 or ECDSA"},
		{"an authority", "", raw(t, x509.CertificateRequest{ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Value: ca}}}), "has the extension 2.5.29.19"},
		{"more of a subject", "", raw(t, x509.CertificateRequest{Subject: pkix.Name{OrganizationalUnit: []string{"x"}}}), "nothing else in its subject"},
		{"a mail address", "", raw(t, x509.CertificateRequest{EmailAddresses: []string{"root@example.org"}}), "names and addresses only"},
		{"a URI", "", raw(t, x509.CertificateRequest{URIs: []*url.URL{{Scheme: "spiffe", Host: "x"}}}), "names and addresses only"},
		{"a forged signature", "", forged, "parse certificate request"},
		{"nothing", "", nil, "no CERTIFICATE REQUEST block"},
		{"too much", "", slices.Concat(good, make([]byte, maxRequest)), "of at most 4096"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			if tt.peer != "" {
				b.from(tt.peer)
			}
			_, err := b.sign(t, token, tt.request)
			wantRefused(t, err, connect.CodePermissionDenied, tt.want)
			if text := b.log.String(); strings.Contains(text, "msg=signed") || strings.Count(text, "msg=refused") != 1 || strings.Count(text, "\n") != 2 {
				t.Errorf("the log says %s", text)
			}
		})
	}
}

// Whatever is asked for, what is granted is within the policy.
func FuzzPolicy(f *testing.F) {
	f.Add(request(f, pki.Ed25519, leaf()))
	f.Add(raw(f, x509.CertificateRequest{DNSNames: []string{"worker-1"}}))
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\nMAA=\n-----END CERTIFICATE REQUEST-----\n"))
	p := policy{names: []string{"cp-1"}, addrs: []netip.Addr{controlPlane}}
	f.Fuzz(func(t *testing.T, text []byte) {
		_, leaf, err := p.check(text, worker)
		if err != nil {
			return
		}
		if len(leaf.Orgs) > 0 || leaf.Client || !leaf.Server || !slices.Equal(leaf.IPs, append([]netip.Addr{worker}, loopback...)) ||
			!slices.Equal(leaf.DNS, []string{leaf.CN, localhost}) || !hostname.MatchString(leaf.CN) || strings.EqualFold(leaf.CN, "cp-1") {
			t.Errorf("%+v", leaf)
		}
	})
}

// A worker can't become a peer, nor anybody else with a role: whoever asks for one with the
// token gets nothing.
func TestNoCertificateWithARole(t *testing.T) {
	t.Parallel()
	for _, role := range api.Roles() {
		for name, orgs := range map[string][]string{"alone": {string(role)}, "among others": {"garboard", string(role)}} {
			b := newBench(t)
			l := leaf()
			l.Orgs = orgs
			crt, err := b.sign(t, token, request(t, pki.Ed25519, l))
			if crt != nil {
				t.Errorf("%s %s: it was signed", role, name)
			}
			wantRefused(t, err, connect.CodePermissionDenied, "has no roles")
		}
	}
}

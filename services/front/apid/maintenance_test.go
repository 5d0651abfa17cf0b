package apid

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
)

// Without a configuration the node answers anybody, over every protocol, what is
// declared for that, and nothing else. While its disk is locked, that is less.
func TestMatrixMaintenance(t *testing.T) {
	t.Parallel()
	matrixAnonymous(t, api.ModeMaintenance, "maintenance mode", func(m api.Method) bool { return m.Maintenance })
}

func TestMatrixLocked(t *testing.T) {
	t.Parallel()
	var all []string
	matrixAnonymous(t, api.ModeLocked, "unlock it first", func(m api.Method) bool { return m.Locked })
	for _, m := range api.Methods() {
		if m.Locked {
			all = append(all, strings.TrimPrefix(m.Procedure, "/garboard.v1.NodeService/"))
		}
	}
	if got := strings.Join(all, " "); got != "Status Unlock Version" {
		t.Errorf("a stranger may call %s", got)
	}
}

func matrixAnonymous(t *testing.T, mode, refusal string, open func(m api.Method) bool) {
	ca := newCA(t)
	s := maintenance(t, "")
	s.mode = mode
	b := newBench(t, s, everything())
	for name, cert := range map[string]*tls.Certificate{"nobody": nil, "an administrator of something": admin(t, ca)} {
		for _, p := range protocols {
			client := b.client(t, cert, p.http2)
			for _, m := range api.Methods() {
				err := ask(t.Context(), client, b.url(""), m, p.options...)
				seen := b.backend.take()
				if !open(m) {
					if connect.CodeOf(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), refusal) || len(seen) > 0 {
						t.Errorf("%s, %s, %s: %v", name, p.name, m.Procedure, err)
					}
					continue
				}
				if err != nil || len(seen) != 1 {
					t.Fatalf("%s, %s, %s: %v", name, p.name, m.Procedure, err)
				}
				h := seen[0].Header
				if h.Get(api.HeaderMode) != mode || h.Get(api.HeaderPeer) != "" || h.Get(api.HeaderRoles) != "" {
					t.Errorf("%s, %s: headers %v", name, m.Procedure, h)
				}
			}
		}
	}
}

// Kernel parameter garboard.maintenance.ca: only who shows that certificate, or
// one of that authority's, comes in.
func TestMaintenancePinned(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t), newCA(t)
	leaf := pki.Leaf{CN: "alice"}
	mine := shown(t, ca, leaf)
	expired := shown(t, other, pki.Leaf{CN: "old", Now: time.Now(), Validity: time.Nanosecond})
	method, _ := api.Lookup("/garboard.v1.ConfigService/Apply")
	for _, tc := range []struct {
		name   string
		pinned []byte // DER
		cert   *tls.Certificate
		want   string
	}{
		{"no certificate", mine.Certificate[0], nil, "certificate required"},
		{"the very certificate", mine.Certificate[0], mine, ""},
		{"the very certificate, expired", expired.Certificate[0], expired, ""},
		{"another one of its authority", mine.Certificate[0], shown(t, ca, leaf), "bad certificate"},
		{"by the authority, sent along", parse(t, ca.Cert).Raw, shown(t, ca, leaf, ca.Cert), ""},
		{"by the authority, not sent along", parse(t, ca.Cert).Raw, shown(t, ca, leaf), "bad certificate"},
		{"by another authority, the right one sent along", parse(t, ca.Cert).Raw, shown(t, other, leaf, ca.Cert), "bad certificate"},
		{"not yet valid by a clock that isn't set", parse(t, ca.Cert).Raw, shown(t, ca, pki.Leaf{CN: "soon", Now: time.Now().Add(72 * time.Hour)}, ca.Cert), ""},
		{"somebody's certificate sent along", mine.Certificate[0], shown(t, other, leaf, pki.EncodeCert(mine.Certificate[0])), "bad certificate"},
	} {
		b := newBench(t, maintenance(t, api.Fingerprint(tc.pinned)), everything())
		err := ask(t.Context(), b.client(t, tc.cert, false), b.url(""), method)
		seen := b.backend.take()
		if tc.want == "" {
			if err != nil || len(seen) != 1 || seen[0].Header.Get(api.HeaderMode) != api.ModeMaintenance {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		code := connect.CodeUnavailable
		if strings.HasPrefix(tc.want, "isn't") {
			code = connect.CodeUnauthenticated
		}
		if err == nil || !refusedAs(err, code, tc.want) || len(seen) > 0 {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// Maintenance mode ends without a restart, for connections that are open too.
func TestMaintenanceEnds(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, maintenance(t, ""), everything())
	method, _ := api.Lookup("/garboard.v1.NodeService/Version")
	anonymous, boss := b.client(t, nil, true), b.client(t, admin(t, ca), true)
	call := func(c *http.Client) error { return ask(t.Context(), c, b.url(""), method) }
	for _, c := range []*http.Client{anonymous, boss} {
		if err := call(c); err != nil {
			t.Fatal(err)
		}
	}
	b.writeAndWait(t, settings{mode: modeClosed})
	for _, c := range []*http.Client{anonymous, boss, b.client(t, nil, true)} {
		if err := call(c); err == nil {
			t.Error("a call went through while the gate is closed")
		}
	}
	b.writeAndWait(t, normal(t, ca))
	if err := call(anonymous); err == nil {
		t.Error("an unknown client was served by a node with a configuration")
	}
	if err := call(b.client(t, admin(t, ca), true)); err != nil {
		t.Error(err)
	}
}

func TestParsePinned(t *testing.T) {
	t.Parallel()
	hash := api.Fingerprint([]byte("x"))
	for _, text := range []string{hash, strings.ToUpper(hash), api.ShownFingerprint([]byte("x"))} {
		if got, err := parsePinned(text); got != hash || err != nil {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "yes", hash[:62], hash + "00", strings.Repeat("g", 64)} {
		if got, err := parsePinned(text); err == nil || got != "" {
			t.Errorf("%s: %q", text, got)
		}
	}
}

// The certificate of maintenance mode is Ed25519, and holds for itself.
func TestSelf(t *testing.T) {
	t.Parallel()
	s, err := newSelf(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	cert := parse(t, s.cert)
	if cert.PublicKeyAlgorithm != x509.Ed25519 || cert.CheckSignature(cert.SignatureAlgorithm, cert.RawTBSCertificate, cert.Signature) != nil {
		t.Errorf("%s", cert.PublicKeyAlgorithm)
	}
	if block, _ := pem.Decode(s.cert); api.ShownFingerprint(block.Bytes) != s.fingerprint || len(s.fingerprint) != 95 {
		t.Errorf("fingerprint %s", s.fingerprint)
	}
	if _, err := tls.X509KeyPair(s.cert, s.key); err != nil {
		t.Error(err)
	}
}

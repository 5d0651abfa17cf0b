package apid

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/front/statefile"
)

// Files of the gate's briefing.
const (
	bundleName = "ca.crt" // authorities of clients; several during a rotation
	certName   = "server.crt"
	keyName    = "server.key"
)

// modeClosed is beside api.ModeNormal and api.ModeMaintenance: nobody may come in.
// The node has a configuration, but its certificate isn't made yet.
const modeClosed = "closed"

// facts are what the gate is told beside files.
type facts struct {
	Mode string `json:"mode"`
	// PinnedCA, in maintenance mode, is the SHA-256 of a certificate that clients
	// must show: their own, or their authority's. Hexadecimal; empty: none.
	PinnedCA string `json:"pinnedCA,omitempty"`
}

// knowledge is what PID 1 tells the gate.
type knowledge struct {
	mode     string
	pinnedCA string
	bundle   []byte
	cert     []byte
	key      []byte
}

func (k knowledge) briefing() statefile.State[facts] {
	return statefile.State[facts]{
		Facts: facts{Mode: k.mode, PinnedCA: k.pinnedCA},
		Files: map[string][]byte{bundleName: k.bundle, certName: k.cert, keyName: k.key},
	}
}

func heard(b statefile.State[facts]) knowledge {
	return knowledge{
		mode: b.Facts.Mode, pinnedCA: b.Facts.PinnedCA,
		bundle: b.Files[bundleName], cert: b.Files[certName], key: b.Files[keyName],
	}
}

func read(dir string) (knowledge, error) {
	b, err := statefile.Read[facts](dir, bundleName, certName, keyName)
	return heard(b), err
}

// state is what the gate goes by. It never changes: another one takes its place.
type state struct {
	mode    string
	pinned  string         // SHA-256 in lower-case hexadecimal; "": none
	trusted *x509.CertPool // normal mode
	tls     *tls.Config    // nil when closed
}

// newState makes sense of k.
func newState(k knowledge) (*state, error) {
	s := &state{mode: k.mode, pinned: k.pinnedCA}
	switch k.mode {
	case modeClosed:
		return s, nil
	case api.ModeNormal:
		pool, err := authorities(k.bundle)
		if err != nil {
			return nil, err
		}
		s.trusted = pool
	case api.ModeMaintenance:
	default:
		return nil, fmt.Errorf("mode %q: there is no such mode", k.mode)
	}
	cert, err := tls.X509KeyPair(k.cert, k.key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the API: %w", err)
	}
	s.tls = s.config(cert)
	return s, nil
}

func (s *state) config(cert tls.Certificate) *tls.Config {
	c := &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{cert},
		NextProtos:   []string{"h2", "http/1.1"},
		// A ticket would bring back a client whose authority is gone.
		SessionTicketsDisabled: true,
	}
	if s.knowsCallers() {
		c.ClientAuth = tls.RequireAnyClientCert
		c.VerifyConnection = s.admit
	}
	return c
}

// knowsCallers tells whether clients must show a certificate.
func (s *state) knowsCallers() bool { return s.mode == api.ModeNormal || s.pinned != "" }

// authorities are all certificates of a bundle.
func authorities(bundle []byte) (*x509.CertPool, error) {
	pool, found := x509.NewCertPool(), 0
	for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("authority of clients: %w", err)
		}
		pool.AddCert(cert)
		found++
	}
	if found == 0 {
		return nil, errors.New("authority of clients: none is given")
	}
	return pool, nil
}

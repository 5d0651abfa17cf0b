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

// Files of the gate's state.
const (
	bundleName = "ca.crt" // authorities of clients; several during a rotation
	certName   = "server.crt"
	keyName    = "server.key"
	// metricsName is machine.metrics.clientCA.
	metricsName = "metrics-ca.crt"
)

// modeClosed, beside api.ModeNormal and api.ModeMaintenance, refuses every client. The
// node has a configuration, but its certificate isn't made yet.
const modeClosed = "closed"

// facts are the part of the gate's state that isn't in files of its own.
type facts struct {
	Mode string `json:"mode"`
	// PinnedCA, in maintenance mode, is the SHA-256 of a certificate that clients
	// must show: their own, or their authority's. Hexadecimal; empty: none.
	PinnedCA string `json:"pinnedCA,omitempty"`
	// Metrics is machine.metrics.address; empty: none.
	Metrics string `json:"metrics,omitempty"`
}

// settings are what PID 1 writes for the gate.
type settings struct {
	mode      string
	pinnedCA  string
	metrics   string
	bundle    []byte
	cert      []byte
	key       []byte
	metricsCA []byte
}

func (s settings) toState() statefile.State[facts] {
	return statefile.State[facts]{
		Facts: facts{Mode: s.mode, PinnedCA: s.pinnedCA, Metrics: s.metrics},
		Files: map[string][]byte{bundleName: s.bundle, certName: s.cert, keyName: s.key, metricsName: s.metricsCA},
	}
}

func fromState(b statefile.State[facts]) settings {
	return settings{
		mode: b.Facts.Mode, pinnedCA: b.Facts.PinnedCA, metrics: b.Facts.Metrics,
		bundle: b.Files[bundleName], cert: b.Files[certName], key: b.Files[keyName], metricsCA: b.Files[metricsName],
	}
}

func read(dir string) (settings, error) {
	b, err := statefile.Read[facts](dir, bundleName, certName, keyName, metricsName)
	return fromState(b), err
}

// state is made of settings. It never changes: a new one replaces it.
type state struct {
	mode    string
	pinned  string         // SHA-256 in lower-case hexadecimal; "": none
	trusted *x509.CertPool // normal mode
	tls     *tls.Config    // nil when closed
	// The metrics' own address.
	metrics    string         // "": none
	metricsTLS *tls.Config    // nil: none
	scrapers   *x509.CertPool // nil: none besides trusted
}

// newState parses and checks in.
func newState(in settings) (*state, error) {
	s := &state{mode: in.mode, pinned: in.pinnedCA}
	switch in.mode {
	case modeClosed:
		return s, nil
	case api.ModeNormal:
		pool, err := authorities(in.bundle)
		if err != nil {
			return nil, err
		}
		s.trusted = pool
	case api.ModeMaintenance:
	default:
		return nil, fmt.Errorf("mode %q: there is no such mode", in.mode)
	}
	cert, err := tls.X509KeyPair(in.cert, in.key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the API: %w", err)
	}
	s.tls = s.config(cert, s.admit)
	if in.metrics == "" || in.mode != api.ModeNormal {
		return s, nil
	}
	s.metrics = in.metrics
	if len(in.metricsCA) > 0 {
		if s.scrapers, err = authorities(in.metricsCA); err != nil {
			return nil, err
		}
	}
	s.metricsTLS = s.config(cert, func(c tls.ConnectionState) error {
		_, err := s.identifyScraper(c.PeerCertificates)
		return err
	})
	return s, nil
}

func (s *state) config(cert tls.Certificate, admit func(tls.ConnectionState) error) *tls.Config {
	c := &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{cert},
		NextProtos:   []string{"h2", "http/1.1"},
		// A ticket would bring back a client whose authority is gone.
		SessionTicketsDisabled: true,
	}
	if s.requiresCertificate() {
		c.ClientAuth = tls.RequireAnyClientCert
		c.VerifyConnection = admit
	}
	return c
}

// requiresCertificate reports whether clients must show a certificate.
func (s *state) requiresCertificate() bool { return s.mode == api.ModeNormal || s.pinned != "" }

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

package apid

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/api"
)

// modeClosed, beside api.ModeNormal and api.ModeMaintenance, refuses every client. The
// node has a configuration, but its certificate isn't made yet.
const modeClosed = "closed"

// facts are what PID 1 writes for the gate. Certificates and keys are PEM.
type facts struct {
	Mode string `json:"mode"`
	// Authorities are those of clients; several during a rotation.
	Authorities []byte `json:"authorities,omitempty"`
	Cert        []byte `json:"cert,omitempty"`
	Key         []byte `json:"key,omitempty"`
	// PinnedCA, in maintenance mode, is the SHA-256 of a certificate that clients
	// must show: their own, or their authority's. Hexadecimal; empty: none.
	PinnedCA string `json:"pinnedCA,omitempty"`
	// Metrics is machine.metrics.address, and MetricsCA its clientCA; empty: none.
	Metrics   string `json:"metrics,omitempty"`
	MetricsCA []byte `json:"metricsCA,omitempty"`
	// Floor is a time that is over for certain, whatever the clock shows.
	Floor time.Time `json:"floor,omitzero"`
}

// state is made of what PID 1 has written. It never changes: a new one replaces it.
type state struct {
	mode    string
	pinned  string // SHA-256 in lower-case hexadecimal; "": none
	floor   time.Time
	trusted *x509.CertPool // normal mode
	tls     *tls.Config    // nil when closed
	// The metrics' own address.
	metrics    string         // "": none
	metricsTLS *tls.Config    // nil: none
	scrapers   *x509.CertPool // nil: none besides trusted
}

// newState parses and checks in.
func newState(in facts) (*state, error) {
	s := &state{mode: in.Mode, pinned: in.PinnedCA, floor: in.Floor}
	switch s.mode {
	case modeClosed:
		return s, nil
	case api.ModeNormal:
		pool, err := authorities(in.Authorities)
		if err != nil {
			return nil, err
		}
		s.trusted = pool
	case api.ModeMaintenance, api.ModeLocked:
	default:
		return nil, fmt.Errorf("mode %q: there is no such mode", s.mode)
	}
	cert, err := tls.X509KeyPair(in.Cert, in.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the API: %w", err)
	}
	s.tls = s.config(cert, s.admit)
	if in.Metrics == "" || s.mode != api.ModeNormal {
		return s, nil
	}
	s.metrics = in.Metrics
	if len(in.MetricsCA) > 0 {
		if s.scrapers, err = authorities(in.MetricsCA); err != nil {
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
		// A ticket would resume a session of a client whose authority was removed.
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

// authorities are all certificates of a bundle. Whatever else is in it is passed by, as it is where the configuration
// is checked: without a state, nobody could correct it.
func authorities(bundle []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(bundle) {
		return nil, errors.New("authority of clients: none is given")
	}
	return pool, nil
}

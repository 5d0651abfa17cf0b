package apid

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/front/tlsserver"
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

// maxName bounds how much of a certificate's common name is printed: an X.520 name
// has at most 64 characters.
const maxName = 64

// identity is the client's, by its certificate.
type identity struct {
	name  string
	roles []string // of api.Roles only
	// from and until bound the certificate's validity; both are zero for one that is
	// trusted by its hash, and for a client without a certificate.
	from, until time.Time
}

// admit is the check of a TLS handshake, which fails for unknown clients; TLS reports
// no reason to them. With a certificate that isn't valid at this time, the handshake
// succeeds, and every call returns the reason (see current).
func (s *state) admit(c tls.ConnectionState) error {
	_, err := s.identify(c.PeerCertificates)
	return err
}

// identify returns the identity that these certificates prove. It ignores the time.
func (s *state) identify(chain []*x509.Certificate) (identity, error) {
	if !s.requiresCertificate() {
		return identity{}, nil
	}
	if len(chain) == 0 {
		return identity{}, errors.New("the client shows no certificate")
	}
	if s.mode != api.ModeNormal {
		return s.identifyPinned(chain)
	}
	if err := verify(chain, s.trusted); err != nil {
		return identity{}, err
	}
	return newIdentity(chain[0]), nil
}

// verdict is the result of identify with one state.
type verdict struct {
	by     *state
	caller identity
	err    error
}

// identifier is identify or identifyScraper.
type identifier func(chain []*x509.Certificate) (identity, error)

// recall is identify once per connection and state.
func (s *state) recall(c *tlsserver.Conn, chain []*x509.Certificate, identify identifier) (identity, error) {
	if v, _ := c.Memo.Load().(*verdict); v != nil && v.by == s {
		return v.caller, v.err
	}
	caller, err := identify(chain)
	c.Memo.Store(&verdict{s, caller, err})
	return caller, err
}

// identifyPinned looks for the pinned certificate among those that are shown.
func (s *state) identifyPinned(chain []*x509.Certificate) (identity, error) {
	i := slices.IndexFunc(chain, func(c *x509.Certificate) bool { return api.Fingerprint(c.Raw) == s.pinned })
	switch {
	case i < 0:
		return identity{}, fmt.Errorf("none of the client's %d certificates is the one that the kernel command line names", len(chain))
	case i == 0:
		// It was named by its hash, so its contents don't matter. In maintenance mode the
		// clock may not be set yet, either.
		caller := newIdentity(chain[0])
		caller.from, caller.until = time.Time{}, time.Time{}
		return caller, nil
	case !chain[i].IsCA:
		return identity{}, errors.New("the certificate that the kernel command line names isn't an authority's")
	}
	pool := x509.NewCertPool()
	pool.AddCert(chain[i])
	if err := verify(chain, pool); err != nil {
		return identity{}, err
	}
	caller := newIdentity(chain[0])
	caller.from = time.Time{} // as above
	return caller, nil
}

// verify checks the first of chain against roots, whatever the time is.
func verify(chain []*x509.Certificate, roots *x509.CertPool) error {
	leaf := chain[0]
	rest := x509.NewCertPool()
	for _, c := range chain[1:] {
		rest.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: rest, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		CurrentTime: within(time.Now(), leaf.NotBefore, leaf.NotAfter),
	})
	if err != nil {
		return fmt.Errorf("certificate %q: %w", printable(leaf.Subject.CommonName), err)
	}
	return nil
}

// within is the time between from and until that is nearest to t.
func within(t, from, until time.Time) time.Time {
	switch {
	case t.Before(from):
		return from
	case t.After(until):
		return until
	}
	return t
}

func newIdentity(c *x509.Certificate) identity {
	caller := identity{name: printable(cmp.Or(c.Subject.CommonName, api.Fingerprint(c.Raw))), from: c.NotBefore, until: c.NotAfter}
	// Only our own roles: they are handed on as a list with commas between, and an
	// organisation may be called anything.
	for _, role := range api.Roles() {
		if slices.Contains(c.Subject.Organization, string(role)) {
			caller.roles = append(caller.roles, string(role))
		}
	}
	return caller
}

// current checks the caller's certificate with the node's clock. That may be the
// one that is wrong, so both sides are named.
func (c identity) current(now time.Time) error {
	var why string
	switch {
	case c.until.IsZero():
		return nil
	case now.After(c.until):
		why = "expired at " + c.until.UTC().Format(time.RFC3339)
	case now.Before(c.from):
		why = "isn't valid before " + c.from.UTC().Format(time.RFC3339)
	default:
		return nil
	}
	return fmt.Errorf("client certificate %q %s; the node's clock shows %s: if that is wrong, set it (machine.time.servers), else make a new client certificate",
		c.name, why, now.UTC().Format(time.RFC3339))
}

// printable is text that can be shown and sent in a header.
func printable(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, text)
	return text[:min(len(text), maxName)]
}

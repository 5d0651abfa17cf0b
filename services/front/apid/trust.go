package apid

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/services/front/connlimit"
)

// maxName bounds what is told of a certificate's common name: an X.520 name has
// at most 64 characters.
const maxName = 64

// caller is who is at the other end of a connection.
type caller struct {
	name  string
	roles []string // only those that there are
	// from and until bound the certificate's validity; both are zero for one that
	// is trusted for what it is, and for nobody.
	from, until time.Time
}

// admit is the check of a TLS handshake: who isn't known at all gets no further,
// and learns no more than that from TLS. A certificate that only the clock speaks
// against comes in to be told so, by every call (see current).
func (s *state) admit(c tls.ConnectionState) error {
	_, err := s.identify(c.PeerCertificates)
	return err
}

// identify finds out who shows these certificates. It doesn't look at the clock.
func (s *state) identify(chain []*x509.Certificate) (caller, error) {
	if !s.knowsCallers() {
		return caller{}, nil
	}
	if len(chain) == 0 {
		return caller{}, errors.New("the client shows no certificate")
	}
	if s.mode == api.ModeMaintenance {
		return s.identifyPinned(chain)
	}
	if err := verify(chain, s.trusted); err != nil {
		return caller{}, err
	}
	return newCaller(chain[0]), nil
}

// verdict is who the caller is, by one state.
type verdict struct {
	by  *state
	who caller
	err error
}

// recall is identify, once per connection and state.
func (s *state) recall(c *connlimit.Conn, chain []*x509.Certificate) (caller, error) {
	if v, _ := c.Memo.Load().(*verdict); v != nil && v.by == s {
		return v.who, v.err
	}
	who, err := s.identify(chain)
	c.Memo.Store(&verdict{s, who, err})
	return who, err
}

// identifyPinned looks for the pinned certificate among those that are shown.
func (s *state) identifyPinned(chain []*x509.Certificate) (caller, error) {
	i := slices.IndexFunc(chain, func(c *x509.Certificate) bool { return api.Fingerprint(c.Raw) == s.pinned })
	switch {
	case i < 0:
		return caller{}, fmt.Errorf("none of the client's %d certificates is the one that the kernel command line names", len(chain))
	case i == 0:
		// It was named by its hash, so it is good whatever it says about itself. In
		// maintenance mode the clock may not be set yet, either.
		who := newCaller(chain[0])
		who.from, who.until = time.Time{}, time.Time{}
		return who, nil
	case !chain[i].IsCA:
		return caller{}, errors.New("the certificate that the kernel command line names isn't an authority's")
	}
	pool := x509.NewCertPool()
	pool.AddCert(chain[i])
	if err := verify(chain, pool); err != nil {
		return caller{}, err
	}
	return newCaller(chain[0]), nil
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

func newCaller(c *x509.Certificate) caller {
	who := caller{name: printable(c.Subject.CommonName), from: c.NotBefore, until: c.NotAfter}
	// Only our own roles: they are handed on as a list with commas between, and an
	// organisation may be called anything.
	for _, role := range api.Roles() {
		if slices.Contains(c.Subject.Organization, string(role)) {
			who.roles = append(who.roles, string(role))
		}
	}
	return who
}

// current checks the caller's certificate with the node's clock. That may be the
// one that is wrong, so both sides are named.
func (c caller) current(now time.Time) error {
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
	return fmt.Errorf("client certificate %q %s; the node's clock says %s: if that is wrong, set it (machine.time.servers), else make a new client certificate",
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

package doctor

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
)

const (
	// expireSoon: a leaf is renewed three months before its end; one that is still
	// there a month later is not.
	expireSoon = 60 * 24 * time.Hour
	// authoritySoon: to replace an authority takes a change of every node.
	authoritySoon = 180 * 24 * time.Hour
)

var endpointConditions = checks{
	"endpoint-not-resolving": func(s *snapshot) []finding {
		e := s.endpoint
		if e == nil || e.resolve == nil {
			return nil
		}
		return one(finding{what: fmt.Sprintf("The cluster's endpoint %s can't be resolved.", e.url), evidence: []string{e.resolve.Error()}})
	},
	"endpoint-other-cluster": eachAnswer("shows a certificate of another cluster", func(a answer) bool {
		return errors.As(a.err, new(x509.UnknownAuthorityError))
	}),
	"endpoint-wrong-name": eachAnswer("shows a certificate for other names", func(a answer) bool {
		return errors.As(a.err, new(x509.HostnameError))
	}),
	"endpoint-not-kubernetes": eachAnswer("is no Kubernetes API server", func(a answer) bool {
		return errors.Is(a.err, http.ErrSchemeMismatch) || errors.As(a.err, new(tls.RecordHeaderError)) ||
			a.err == nil && (a.code == http.StatusNotFound || a.code >= 300 && a.code < 400 || a.code == http.StatusOK && strings.TrimSpace(a.body) != "ok")
	}),
	"endpoint-not-answering": endpointSilent,
	"certificate-expired":    expiring(func(left time.Duration, _ certificate) bool { return left <= 0 }),
	"certificate-expiring": expiring(func(left time.Duration, c certificate) bool {
		if c.cert.IsCA {
			return left > 0 && left <= authoritySoon
		}
		// What lives shorter than that is renewed by its own measure.
		return left > 0 && left <= min(expireSoon, c.cert.NotAfter.Sub(c.cert.NotBefore)/10)
	}),
}

// eachAnswer makes a finding for each address of the endpoint whose answer holds is true of.
func eachAnswer(what string, holds func(answer) bool) func(*snapshot) []finding {
	return func(s *snapshot) []finding {
		if s.endpoint == nil {
			return nil
		}
		return lists.Some(s.endpoint.answers, func(a answer) (finding, bool) {
			f := finding{what: fmt.Sprintf("The cluster's endpoint %s %s.", s.endpoint.url, what), evidence: []string{a.text()}}
			if a.rejected != nil {
				f.evidence = append(f.evidence, fmt.Sprintf("it shows a certificate of %q for %v %v, issued by %q, SHA-256 %x",
					a.rejected.Subject, a.rejected.DNSNames, a.rejected.IPAddresses, a.rejected.Issuer, sha256.Sum256(a.rejected.Raw)))
			}
			return f, holds(a)
		})
	}
}

// endpointSilent holds where nobody answers, or not all that should. What does
// answer, and wrongly, is another condition's.
func endpointSilent(s *snapshot) []finding {
	e := s.endpoint
	if e == nil || len(e.answers) == 0 {
		return nil
	}
	var f finding
	serving, mine := 0, false
	for i, a := range e.answers {
		mine = mine || s.isMine(e.addresses[i])
		switch {
		case a.ok() || a.rejected != nil:
			serving++
		case a.err != nil || a.code >= http.StatusInternalServerError:
			f.evidence = append(f.evidence, a.text())
		}
	}
	f.what = fmt.Sprintf("The cluster's endpoint %s doesn't answer.", e.url)
	if serving > 0 {
		f.severity = warning
		f.what = fmt.Sprintf("%d of the %d addresses of the cluster's endpoint %s don't answer.", len(f.evidence), len(e.answers), e.url)
		f.why = "One of the control planes is down, or the name has a wrong additional address."
		return one(f)
	}
	f.until = s.at(bootstrapTime)
	switch {
	case mine:
		f.why = "The endpoint is this node's own address, and its API server doesn't serve."
	case s.controlPlane() && s.local != nil && s.local.ok():
		f.until = time.Time{}
		f.why = fmt.Sprintf("The API server of this node serves, and the endpoint is at %v, which is no address of this node: it points to another machine.", e.addresses)
	case s.address != nil:
		f.why = fmt.Sprintf("No API server answers at %v. This node is %s.", e.addresses, s.address.Primary)
	}
	return one(f)
}

// expiring are certificates by what is left of their time.
func expiring(bad func(time.Duration, certificate) bool) func(*snapshot) []finding {
	return func(s *snapshot) []finding {
		return lists.Some(s.certificates, func(c certificate) (finding, bool) {
			left := c.cert.NotAfter.Sub(s.now)
			f := finding{evidence: []string{fmt.Sprintf("certificate %q, issued by %q: valid from %s to %s; now it is %s",
				c.cert.Subject, c.cert.Issuer, stamp(c.cert.NotBefore), stamp(c.cert.NotAfter), stamp(s.now))}}
			if left <= 0 {
				f.what, f.since = fmt.Sprintf("The certificate of %s has expired.", c.of), c.cert.NotAfter
			} else {
				f.what = fmt.Sprintf("The certificate of %s expires in %d days.", c.of, int(left.Hours()/24))
			}
			if !c.renewed {
				f.why, f.next = "It is part of the configuration, and isn't replaced automatically.", "Make a new one and apply it to all nodes before the old one expires."
			}
			return f, bad(left, c)
		})
	}
}

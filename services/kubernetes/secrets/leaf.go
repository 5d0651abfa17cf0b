package secrets

import (
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

// keep returns have if it still matches want, else a new certificate. A new one
// from the same authority is for the same key: certificate and key are two
// files, and a program that reads them while they are replaced would get a pair
// that doesn't match. Keys change with the authority, and with every boot.
func keep(have, ca config.CertKey, want pki.Leaf) (config.CertKey, error) {
	cert, err := pki.ParseCert(have.Crt)
	if err != nil || !signedBy(cert, ca) {
		crt, key, err := ca.CA().Issue(want)
		return config.CertKey{Crt: crt, Key: key}, err
	}
	if fits(cert, ca, want) {
		return have, nil
	}
	crt, err := ca.CA().Sign(cert.PublicKey, want)
	return config.CertKey{Crt: crt, Key: have.Key}, err
}

func signedBy(cert *x509.Certificate, ca config.CertKey) bool {
	return pki.IssuedBy(cert, ca.Crt)
}

// signedByAny reports whether one of the authorities has signed a certificate.
func signedByAny(cert *x509.Certificate, authorities ...config.CertKey) bool {
	return slices.ContainsFunc(authorities, func(ca config.CertKey) bool { return signedBy(cert, ca) })
}

// chained adds the authority's own certificates by each accepted one whose key is there, and
// removes others. So clients that know only a former authority, such as pods that read it
// at their start, accept the server until that authority isn't accepted any more.
func chained(pair, issuing config.CertKey, accepted []config.CertKey) (config.CertKey, error) {
	first, rest := pem.Decode(pair.Crt)
	if first == nil {
		return pair, nil
	}
	var crosses []*x509.Certificate
	for block, more := pem.Decode(rest); block != nil; block, more = pem.Decode(more) {
		if cross, err := x509.ParseCertificate(block.Bytes); err == nil {
			crosses = append(crosses, cross)
		}
	}
	pair.Crt = pem.EncodeToMemory(first)
	for _, older := range accepted {
		if len(older.Key) == 0 {
			continue
		}
		i := slices.IndexFunc(crosses, func(c *x509.Certificate) bool { return signedBy(c, older) })
		if i >= 0 {
			pair.Crt = append(pair.Crt, pki.EncodeCert(crosses[i].Raw)...)
			continue
		}
		cross, err := issuing.CA().CrossSign(older.CA())
		if err != nil {
			return pair, err
		}
		pair.Crt = append(pair.Crt, cross...)
	}
	return pair, nil
}

// fits is false for a certificate of another subject, one that lacks a name,
// and one near its end, unless its authority ends at the same time: no
// certificate can be valid for longer. More names than needed are allowed: an
// address that is missing for a short time is no reason for a new certificate.
func fits(cert *x509.Certificate, ca config.CertKey, want pki.Leaf) bool {
	authority, err := pki.ParseCert(ca.Crt)
	if err != nil || cert.Subject.CommonName != want.CN || !slices.Equal(cert.Subject.Organization, want.Orgs) ||
		want.Now.Before(cert.NotBefore) && cert.NotBefore.After(authority.NotBefore) {
		return false
	}
	last := !cert.NotAfter.Before(authority.NotAfter) && want.Now.Before(cert.NotAfter)
	if want.Now.After(renewAt(cert)) && !last {
		return false
	}
	lacksName := slices.ContainsFunc(want.DNS, func(name string) bool { return !slices.Contains(cert.DNSNames, name) })
	return !lacksName && !slices.ContainsFunc(want.IPs, func(addr netip.Addr) bool {
		return !slices.ContainsFunc(cert.IPAddresses, func(ip net.IP) bool { return ip.Equal(addr.AsSlice()) })
	})
}

func renewAt(cert *x509.Certificate) time.Time { return cert.NotAfter.Add(-pki.RenewBefore) }

const (
	// checkAgainMin: an authority near its own end issues certificates that are due at once.
	checkAgainMin = time.Hour
	// checkAgainMax: a timer doesn't count the time that a machine was suspended.
	checkAgainMax = 24 * time.Hour
)

// renewal is the time until the first of certs has to be replaced, or checked
// again.
func renewal(now time.Time, certs ...config.PEM) time.Duration {
	first := checkAgainMax
	for _, c := range certs {
		if cert, err := pki.ParseCert(c); err == nil {
			first = min(first, renewAt(cert).Sub(now))
		}
	}
	return min(max(first+time.Second, checkAgainMin), checkAgainMax)
}

// uniqueAddrs sorts the addresses, so that their order doesn't matter.
func uniqueAddrs(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

package trustd

import (
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
)

const (
	// maxRequest: a request for one node's few names, with the longest of them, has
	// less than a KiB.
	maxRequest = 4 << 10
	// maxName is of a common name (X.520), and more than Linux lets a node be called.
	maxName = 64
)

// policy is which certificates nodes get. names and addrs are those under which this control
// plane is reached, and all of them together. Pods have addresses of subnets, and so do services.
type policy struct {
	names   []string // in lower case
	addrs   []netip.Addr
	subnets []netip.Prefix
}

// newPolicy has the names of this control plane's certificate of the machine API.
func newPolicy(own *x509.Certificate, n config.ClusterNetwork) policy {
	addr := func(ip net.IP) netip.Addr { a, _ := netip.AddrFromSlice(ip); return a.Unmap() }
	return policy{
		names: lists.Of(own.DNSNames, strings.ToLower), addrs: lists.Of(own.IPAddresses, addr),
		subnets: slices.Concat(n.PodSubnets, n.ServiceSubnets),
	}
}

var loopback = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

const localhost = "localhost"

// check reads the request of a node at peer, and returns the key and the contents of its
// certificate. A request for anything else is refused, not changed, so that the node gets
// an error.
func (p policy) check(text []byte, peer netip.Addr) (crypto.PublicKey, pki.Leaf, error) {
	if len(text) > maxRequest {
		return nil, pki.Leaf{}, fmt.Errorf("the request has %d bytes, of at most %d", len(text), maxRequest)
	}
	request, err := pki.ParseRequest(text)
	if err != nil {
		return nil, pki.Leaf{}, err
	}
	if err := cmp.Or(p.origin(peer), key(request), nothingElse(request), p.name(request), addresses(request, peer)); err != nil {
		return nil, pki.Leaf{}, err
	}
	name := request.Subject.CommonName
	return request.PublicKey, pki.Leaf{
		CN: name, Units: []string{pki.WorkerUnit}, DNS: []string{name, localhost}, IPs: append([]netip.Addr{peer}, loopback...), Server: true,
	}, nil
}

// origin checks that the peer's address can be a node's own.
func (p policy) origin(peer netip.Addr) error {
	switch {
	case !peer.IsGlobalUnicast():
		return fmt.Errorf("the request comes from %s, which can't be a node's address", peer)
	case slices.Contains(p.addrs, peer):
		return fmt.Errorf("the request comes from %s, which is an address of the control planes: nodes must ask each control plane itself, not through a load balancer", peer)
	case slices.ContainsFunc(p.subnets, func(n netip.Prefix) bool { return n.Contains(peer) }):
		return fmt.Errorf("the request comes from %s, which is an address of pods or services, not of a node", peer)
	}
	return nil
}

// key takes the kinds that nodes make.
func key(request *x509.CertificateRequest) error {
	switch request.PublicKey.(type) {
	case ed25519.PublicKey, *ecdsa.PublicKey:
		return nil
	}
	return fmt.Errorf("a key of kind %s: it must be Ed25519 or ECDSA", request.PublicKeyAlgorithm)
}

// hostname is RFC 1123 §2.1.
var hostname = regexp.MustCompile(`^(?i:[a-z0-9]([-a-z0-9]*[a-z0-9])?)(\.(?i:[a-z0-9]([-a-z0-9]*[a-z0-9])?))*$`)

func (p policy) name(request *x509.CertificateRequest) error {
	name := request.Subject.CommonName
	if err := hostName(name); err != nil {
		return err
	}
	if slices.Contains(p.names, strings.ToLower(name)) {
		return fmt.Errorf("the name %s is one of the control planes'", name)
	}
	for _, dns := range request.DNSNames {
		if dns != name && dns != localhost {
			return fmt.Errorf("the name %s isn't the node's, which is %s", quote(dns), name)
		}
	}
	return nil
}

// hostName takes no addresses either: those are checked where they belong.
func hostName(name string) error {
	last := name[strings.LastIndexByte(name, '.')+1:]
	_, err := strconv.Atoi(last)
	if len(name) > maxName || err == nil || !hostname.MatchString(name) || strings.EqualFold(name, localhost) {
		return fmt.Errorf("the common name %s isn't a host name", quote(name))
	}
	return nil
}

// addresses accepts the address of the connection only, which TCP proves.
func addresses(request *x509.CertificateRequest, peer netip.Addr) error {
	asked := false
	for _, ip := range request.IPAddresses {
		addr, _ := netip.AddrFromSlice(ip)
		addr = addr.Unmap()
		asked = asked || addr == peer
		if addr != peer && !slices.Contains(loopback, addr) {
			return fmt.Errorf("the address %s isn't the one that the request comes from, which is %s", addr, peer)
		}
	}
	if !asked {
		return fmt.Errorf("the request comes from %s, which isn't among its addresses: is there something between the node and this control plane that changes them?", peer)
	}
	return nil
}

// subjectAltName is RFC 5280 §4.2.1.6.
var subjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

// nothingElse refuses what a node's certificate doesn't have: roles above all.
func nothingElse(request *x509.CertificateRequest) error {
	if roles := request.Subject.Organization; len(roles) > 0 {
		return fmt.Errorf("a node's certificate has no roles; the request is for %s", quote(strings.Join(roles, ", ")))
	}
	if len(request.Subject.Names) > 1 {
		return errors.New("a node's certificate has a common name, and nothing else in its subject")
	}
	if len(request.EmailAddresses)+len(request.URIs) > 0 {
		return errors.New("a node's certificate has names and addresses only; the request has others, too")
	}
	for _, extension := range request.Extensions {
		if !extension.Id.Equal(subjectAltName) {
			return fmt.Errorf("the request has the extension %s: trustd decides what a certificate may be used for", extension.Id)
		}
	}
	return nil
}

// quote makes text of an unauthenticated client fit for a log.
func quote(text string) string {
	return strconv.QuoteToASCII(text[:min(len(text), maxName)])
}

package config

import "net/netip"

// Resolver answers names for pods on the node itself: docs/networking.md has how.
type Resolver struct {
	// Enabled makes the node answer DNS at 169.254.116.108, or at fd67:6172:6264::53 if the first subnet of pods is one
	// of IPv6. Pods with the DNS policy Default, such as CoreDNS, ask there from their next start. No pod with
	// hostNetwork can have port 53 of all addresses then. Default true.
	Enabled *bool `yaml:"enabled"`
	// DNSOverTLS are asked instead of the name servers of machine.network.nameservers, DHCP and router advertisements.
	// The first three are.
	DNSOverTLS []TLSNameserver `yaml:"dnsOverTLS" key:"address"`
}

// TLSNameserver is a name server that answers over TLS at port 853 (RFC 7858).
type TLSNameserver struct {
	Address netip.Addr `yaml:"address"` // required, such as 9.9.9.9
	Name    string     `yaml:"name"`    // required: the name in its certificate, such as dns.quad9.net
}

// On is whether the node answers.
func (r *Resolver) On() bool { return r.Enabled == nil || *r.Enabled }

// ResolverAddress is where the node answers: an address that is link-local, or unique local (RFC 4193), on each node.
func (c *Config) ResolverAddress() netip.Addr {
	if pods := c.Cluster.Network.PodSubnets; len(pods) > 0 && pods[0].Addr().Is6() {
		return netip.MustParseAddr("fd67:6172:6264::53")
	}
	return netip.MustParseAddr("169.254.116.108")
}

func checkResolver(c *Config, r *report) {
	for i, s := range c.Machine.Network.Resolver.DNSOverTLS {
		if !s.Address.IsValid() || s.Address.IsUnspecified() || s.Address.IsMulticast() {
			r.bad(at("machine", "network", "resolver", "dnsOverTLS", i, "address"), "%s can't be the address of a server, such as 9.9.9.9", s.Address)
		}
	}
}

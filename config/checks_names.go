package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

const (
	// MaxHostname is the limit of Linux and of a DNS label.
	MaxHostname = 63
	maxDNSName  = 253
	// MaxNameservers is how many of them the resolvers of programs ask (MAXNS in resolv.h).
	MaxNameservers = 3
)

var (
	dnsName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	// numbers are never the name of a host: its last part would have a letter (RFC 3696).
	numbers = regexp.MustCompile(`^[0-9.]+$`)
	// dottedPort is an endpoint with a dot instead of a colon before the port.
	dottedPort = regexp.MustCompile(`^(\d+\.\d+\.\d+\.\d+)\.(\d+)$`)
)

// IsDNSName reports whether a name in lower case is one (RFC 1123 §2.1), as Kubernetes demands for names of nodes.
func IsDNSName(name string) bool { return len(name) <= maxDNSName && dnsName.MatchString(name) }

// checkHost requires a DNS name or an IP address.
func checkHost(host string) error {
	if _, err := netip.ParseAddr(host); err == nil {
		return nil
	}
	switch err := lacksColon(host); {
	case err != nil:
		return err
	case numbers.MatchString(host):
		return fmt.Errorf("%s is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255", quote(host))
	case !IsDNSName(strings.ToLower(host)):
		return fmt.Errorf("%s is neither a DNS name nor an IP address", quote(host))
	}
	return nil
}

// lacksColon refuses an endpoint such as 10.0.0.1.6443.
func lacksColon(endpoint string) error {
	if m := dottedPort.FindStringSubmatch(endpoint); m != nil {
		return fmt.Errorf("%s lacks a colon before the port; did you mean %s:%s", quote(endpoint), m[1], m[2])
	}
	return nil
}

func checkHostname(c *Config, r *report) {
	name := c.Machine.Network.Hostname
	if name != "" && (len(name) > MaxHostname || !dnsName.MatchString(name)) {
		r.bad(at("machine", "network", "hostname"), "%s must be of lower-case letters, digits, dashes and dots, %d at most: Kubernetes names the node after it", quote(name), MaxHostname)
	}
	if name == "" && c.Machine.Network.AutoHostname == HostnameOff {
		r.lacks(at("machine", "network", "hostname"), "the name of the node, because autoHostname is off")
	}
	if domain := c.Cluster.Network.DNSDomain; !IsDNSName(domain) {
		r.bad(at("cluster", "network", "dnsDomain"), "%s is not a DNS name", quote(domain))
	}
	for i, server := range c.Machine.Network.Nameservers {
		if server.IsUnspecified() || server.IsMulticast() {
			r.bad(at("machine", "network", "nameservers", i), "%s can't be the address of a server", server)
		}
	}
	for i, domain := range c.Machine.Network.SearchDomains {
		if !IsDNSName(strings.ToLower(domain)) {
			r.bad(at("machine", "network", "searchDomains", i), "%s is not a DNS name, such as example.org", quote(domain))
		}
	}
	for i, entry := range c.Machine.Network.ExtraHostEntries {
		for j, alias := range entry.Aliases {
			where := at("machine", "network", "extraHostEntries", i, "aliases", j)
			switch name := strings.ToLower(alias); {
			case !IsDNSName(name) || numbers.MatchString(name):
				r.bad(where, "%s is not the name of a host, such as registry.example.org", quote(alias))
			case name == "localhost" || name == c.Machine.Network.Hostname:
				r.bad(where, "%s is the name of the node itself, which has lines of its own in /etc/hosts", quote(alias))
			}
		}
	}
}

func warnNameservers(c *Config, r *report) {
	if servers := c.Machine.Network.Nameservers; len(servers) > MaxNameservers {
		r.warn(at("machine", "network", "nameservers", MaxNameservers), "programs ask the first %d name servers only, and never %s; leave out the others", MaxNameservers, servers[MaxNameservers])
	}
}

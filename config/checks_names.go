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
	own := c.Machine.Network.Hostname
	if own == "" && c.Machine.Network.AutoHostname == HostnameOff {
		r.lacks(at("machine", "network", "hostname"), "the name of the node, because autoHostname is off")
	}
	for i, entry := range c.Machine.Network.ExtraHostEntries {
		for j, alias := range entry.Aliases {
			if name := strings.ToLower(alias); name != "" && (name == "localhost" || name == own) {
				r.bad(at("machine", "network", "extraHostEntries", i, "aliases", j), "%s is the name of the node itself, which has lines of its own in /etc/hosts", quote(alias))
			}
		}
	}
}

func checkDNSName(name string) error {
	if !IsDNSName(strings.ToLower(name)) {
		return fmt.Errorf("%s is not a DNS name", quote(name))
	}
	return nil
}

func checkHostName(name string) error {
	if err := checkDNSName(name); err != nil || !numbers.MatchString(name) {
		return err
	}
	return fmt.Errorf("%s is an address", quote(name))
}

func checkServer(addr netip.Addr) error {
	if addr.IsUnspecified() || addr.IsMulticast() {
		return fmt.Errorf("%s can't be the address of a server", addr)
	}
	return nil
}

func warnNameservers(c *Config, r *report) {
	if servers := c.Machine.Network.Nameservers; len(servers) > MaxNameservers {
		r.warn(at("machine", "network", "nameservers", MaxNameservers), "programs ask the first %d name servers only, and never %s; leave out the others", MaxNameservers, servers[MaxNameservers])
	}
}

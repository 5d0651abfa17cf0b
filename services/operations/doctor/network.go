package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

var networkConditions = []condition{
	{
		id: "network-no-address", severity: failure,
		sees: "Service networkd isn't up; the node has no address, and can't be reached.",
		why:  "A link that the configuration names isn't there, has no carrier, or no DHCP server answers on it.",
		next: "Plug the cable in, correct machine.network.interfaces, or look after the DHCP server.",
		holds: func(s *snapshot) []finding {
			found := s.down("networkd", "The node has no address yet.")
			for i := range found {
				switch m := s.services["networkd"].Message; {
				case strings.Contains(m, "to appear"):
					found[i].why, found[i].next = "A network interface that the configuration names isn't there.", "Plug it in, load its driver, or correct machine.network.interfaces."
				case strings.Contains(m, "DHCP answer"):
					found[i].why, found[i].next = "No DHCP server answers.", "Look after the DHCP server and the cable, or give the node an address in machine.network.interfaces."
				case strings.Contains(m, "validSubnets"):
					found[i].why, found[i].next = "No address is in a subnet of machine.kubelet.nodeIP.validSubnets.", "Correct machine.kubelet.nodeIP.validSubnets or the addresses."
				}
			}
			return found
		},
	},
	{
		id: "network-no-route", severity: warning,
		sees:    "network is unreachable in logs; nothing outside the node's own network answers.",
		why:     "No link has a default route: DHCP gave none, or the configuration has none.",
		next:    "Add a route for 0.0.0.0/0 (or ::/0) to machine.network.interfaces, or let DHCP give one. A cluster that needs nothing from outside does without.",
		follows: []string{"network-no-address"},
		holds: func(s *snapshot) []finding {
			if !s.route.seen || s.route.v4 || s.route.v6 || s.address == nil {
				return nil
			}
			outside := s.outside()
			if len(outside) == 0 {
				return nil
			}
			return one(finding{what: "The node has no default route.", evidence: append([]string{"/proc/net/route: no entry for 0.0.0.0/0; /proc/net/ipv6_route: none for ::/0"}, outside...)})
		},
	},
	{
		id: "no-nameserver", severity: failure,
		sees:    "lookup …: no such host, or server misbehaving, in logs.",
		why:     "Names are to be resolved, and the node knows no name server: DHCP gave none, and the configuration has none.",
		next:    "Name some in machine.network.nameservers.",
		follows: []string{"network-no-address"},
		holds: func(s *snapshot) []finding {
			if !s.known || len(s.resolvers) > 0 {
				return nil
			}
			names := s.names()
			if len(names) == 0 {
				return nil
			}
			return one(finding{what: "The node has no name server.", evidence: append([]string{"Resolvers network/resolvers: none"}, names...)})
		},
	},
}

// outside is what the node is to reach and has no network for.
func (s *snapshot) outside() []string {
	near := func(a netip.Addr) bool {
		return a.IsLoopback() || slices.ContainsFunc(s.address.All, func(p netip.Prefix) bool { return p.Masked().Contains(a) })
	}
	var out []string
	if s.endpoint != nil {
		for _, a := range s.endpoint.addresses {
			if !near(a) {
				out = append(out, fmt.Sprintf("cluster.controlPlane.endpoint %s is at %s, in none of the node's networks", s.endpoint.url, a))
			}
		}
	}
	for _, a := range s.resolvers {
		if !near(a) {
			out = append(out, fmt.Sprintf("name server %s is in none of the node's networks", a))
		}
	}
	for id, svc := range s.services {
		if !svc.Up && strings.Contains(svc.Message, "network is unreachable") {
			out = append(out, s.services[id].asStatus())
		}
	}
	return out
}

// names are what is configured by name and can't work without a name server. A name
// that resolves from /etc/hosts needs none.
func (s *snapshot) names() []string {
	var out []string
	if s.endpoint != nil && s.endpoint.resolve != nil {
		out = append(out, fmt.Sprintf("cluster.controlPlane.endpoint %s: %v", s.endpoint.url, s.endpoint.resolve))
	}
	for _, svc := range s.services {
		if !svc.Up && lookupFailed(svc.Message) {
			out = append(out, svc.asStatus())
		}
	}
	if s.mode == boot.Machine && s.clock != nil && !s.clock.Synced && lookupFailed(s.clock.Message) {
		out = append(out, "time status: "+s.clock.Message)
	}
	return out
}

// lookupFailed knows the errors of Go's resolver.
func lookupFailed(text string) bool {
	return strings.Contains(text, "lookup ") && (strings.Contains(text, "no such host") || strings.Contains(text, "server misbehaving") ||
		strings.Contains(text, "connection refused") || strings.Contains(text, "i/o timeout"))
}

package doctor

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
)

var networkConditions = checks{
	"network-no-address": func(s *snapshot) []finding { return s.down("networkd", "The node has no address yet.") },
	"network-no-family": func(s *snapshot) []finding {
		if s.config == nil || s.address == nil {
			return nil
		}
		return lists.Some(s.config.Cluster.Network.PodSubnets, func(subnet netip.Prefix) (finding, bool) {
			has := slices.ContainsFunc(s.address.All, func(p netip.Prefix) bool { return p.Addr().BitLen() == subnet.Addr().BitLen() })
			return finding{
				what:     fmt.Sprintf("Pods have addresses of %s, and the node has none of that family.", subnet),
				evidence: []string{fmt.Sprintf("NodeAddresses network/default: %v", s.address.All)},
			}, !has
		})
	},
	"network-no-route": func(s *snapshot) []finding {
		if !s.wayless || s.address == nil {
			return nil
		}
		outside := s.outside()
		if len(outside) == 0 {
			return nil
		}
		return one(finding{what: "The node has no default route.", evidence: append([]string{"the kernel has no route for 0.0.0.0/0, and none for ::/0"}, outside...)})
	},
	"nameserver-silent": func(s *snapshot) []finding {
		f := finding{what: "No name server answers.", severity: failure}
		for _, a := range s.servers {
			if a.Err == nil {
				f.what, f.severity = "Not all name servers answer.", warning
			} else {
				f.evidence = append(f.evidence, fmt.Sprintf("name server %s: %v", a.Server, a.Err))
			}
		}
		return one(f)
	},
	"no-nameserver": func(s *snapshot) []finding {
		names := s.names()
		return when(s.known && len(s.resolvers) == 0 && len(names) > 0, finding{what: "The node has no name server.", evidence: append([]string{"Resolvers network/resolvers: none"}, names...)})
	},
}

// outside is what the node is to reach and has no network for.
func (s *snapshot) outside() []string {
	near := func(a netip.Addr) bool {
		return a.IsLoopback() || slices.ContainsFunc(s.address.All, func(p netip.Prefix) bool { return p.Masked().Contains(a) })
	}
	var out []string
	if s.endpoint != nil {
		out = lists.Some(s.endpoint.addresses, func(a netip.Addr) (string, bool) {
			return fmt.Sprintf("cluster.controlPlane.endpoint %s is at %s, in none of the node's networks", s.endpoint.url, a), !near(a)
		})
	}
	out = append(out, lists.Some(s.resolvers, func(a netip.Addr) (string, bool) {
		return fmt.Sprintf("name server %s is in none of the node's networks", a), !near(a)
	})...)
	for id, svc := range s.services {
		if !svc.Up && (svc.Reason == reason.NetworkUnreachable || svc.Reason == containerd.RegistryNoRoute) {
			out = append(out, s.services[id].asStatus())
		}
	}
	return out
}

// names are what is configured by name and can't work without a name server. A name
// that resolves from /etc/hosts needs none.
func (s *snapshot) names() (out []string) {
	if s.endpoint != nil && s.endpoint.resolve != nil {
		out = append(out, fmt.Sprintf("cluster.controlPlane.endpoint %s: %v", s.endpoint.url, s.endpoint.resolve))
	}
	for _, svc := range s.services {
		if !svc.Up && (svc.Reason == reason.NameUnresolved || svc.Reason == containerd.RegistryUnresolved) {
			out = append(out, svc.asStatus())
		}
	}
	if s.mode == boot.Machine && s.clock != nil && !s.clock.Synced && s.clock.Reason == reason.NameUnresolved {
		out = append(out, "time status: "+s.clock.Message)
	}
	return out
}

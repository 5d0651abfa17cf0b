package network

import (
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/config"
)

// defaultMetric of DHCP's routes is that of static ones without a metric.
const defaultMetric = 1024

// route is a route on a known link. Without a gateway the network is on the
// link itself.
type route struct {
	network netip.Prefix
	gateway netip.Addr
	metric  uint32
}

// linkState is what a link has, or is to have, because of us.
type linkState struct {
	index     int // of the link that it was applied to: a link that came back has another
	mtu       int // bytes; 0: left alone
	addresses []netip.Prefix
	routes    []route
}

// planFor is the plan of a link: the configuration's, or DHCP for a physical
// link that it doesn't name (S-094), or nothing.
func planFor(all []config.Link, name string, physical bool) (p config.Link, managed bool) {
	if i := slices.IndexFunc(all, func(l config.Link) bool { return l.Name == name }); i >= 0 {
		return all[i], !all[i].Ignore
	}
	return config.Link{Name: name, DHCP: physical}, physical || name == "lo"
}

// want is what the link is to have. order tells links with default routes
// apart: the kernel refuses two with one metric.
func want(p config.Link, l *lease, order uint32) linkState {
	s := linkState{mtu: p.MTU, addresses: slices.Clone(p.Addresses)}
	for _, r := range p.Routes {
		s.routes = append(s.routes, route{network: r.Network.Masked(), gateway: r.Gateway, metric: r.Metric})
	}
	if l == nil {
		return s
	}
	if s.mtu == 0 {
		s.mtu = l.mtu
	}
	if !slices.Contains(s.addresses, l.address) {
		s.addresses = append(s.addresses, l.address)
	}
	for _, r := range l.routes {
		r.metric = defaultMetric + order
		// A static route to the same network is there because someone wanted it.
		if !slices.ContainsFunc(s.routes, func(o route) bool { return o.network == r.network }) {
			s.routes = append(s.routes, r)
		}
	}
	return s
}

// missing is what is in a and not in b.
func missing[E comparable](a, b []E) []E {
	var out []E
	for _, e := range a {
		if !slices.Contains(b, e) {
			out = append(out, e)
		}
	}
	return out
}

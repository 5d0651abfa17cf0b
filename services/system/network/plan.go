package network

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
)

// defaultMetric of a lease's routes is that of static ones without a metric.
const defaultMetric = 1024

// route is a route on a known link. Without a gateway the network is on the
// link itself.
type route struct {
	network netip.Prefix
	gateway netip.Addr
	metric  uint32
}

// linkState is our settings on a link, current or wanted.
type linkState struct {
	index     int // of the link that it was applied to: a new link of the same name has another
	mtu       int // bytes; 0: unchanged
	mtuBefore int // before we set it
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

// taken are the routes of the links so far. The kernel has one route per
// network and metric: a second one would replace the first, on another link.
type taken map[route]bool

// place gives the route the next free metric, so that the first link has
// priority.
func (t taken) place(r route) route {
	for {
		key := route{network: r.network, metric: r.metric}
		if !t[key] {
			t[key] = true
			return r
		}
		r.metric++
	}
}

// want is the link's wanted state now. order counts the links that should have leases: the
// metric of a link's routes doesn't depend on whether another link has a lease already.
func want(p config.Link, leases []*lease, order uint32, t taken, now time.Time) linkState {
	s := linkState{mtu: p.MTU, addresses: slices.Clone(p.Addresses)}
	for _, r := range p.Routes {
		s.routes = append(s.routes, t.place(route{network: r.Network.Masked(), gateway: r.Gateway, metric: r.Metric}))
	}
	for _, l := range leases {
		s.mtu = cmp.Or(s.mtu, l.mtu)
		for _, a := range l.addresses {
			if a.lasts(now) && !slices.Contains(s.addresses, a.Prefix) {
				s.addresses = append(s.addresses, a.Prefix)
			}
		}
		for _, r := range l.routes {
			// A static route to the same network has priority.
			if slices.ContainsFunc(s.routes, func(o route) bool { return o.network == r.network }) {
				continue
			}
			r.metric = defaultMetric + order
			s.routes = append(s.routes, t.place(r))
		}
	}
	return s
}

// missing is what is in a and not in b.
func missing[E comparable](a, b []E) []E {
	return slices.DeleteFunc(slices.Clone(a), func(e E) bool { return slices.Contains(b, e) })
}

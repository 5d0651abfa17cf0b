package config

import (
	"net/netip"
	"slices"
)

// Link is everything that the configuration has for one link.
type Link struct {
	Name      string
	Addresses []netip.Prefix
	MTU       int
	DHCP      bool
	Ignore    bool
	Routes    []Route
	Bond      *Bond
	VLANs     []VLAN
	VIP       *VIP
	WireGuard *WireGuard
}

// Links merges the entries of each interface, in the order in which the
// interfaces are first named. Addresses, routes and VLANs are combined without
// duplicates. Of the other fields, a value that is set wins (checks refuse
// entries that disagree).
func (n Network) Links() []Link {
	var links []Link
	for _, in := range n.Interfaces {
		i := slices.IndexFunc(links, func(l Link) bool { return l.Name == in.Name })
		if i < 0 {
			i = len(links)
			links = append(links, Link{Name: in.Name})
		}
		l := &links[i]
		if in.CIDR.IsValid() && !slices.Contains(l.Addresses, in.CIDR) {
			l.Addresses = append(l.Addresses, in.CIDR)
		}
		for _, route := range in.Routes {
			if !slices.Contains(l.Routes, route) {
				l.Routes = append(l.Routes, route)
			}
		}
		l.VLANs = append(l.VLANs, in.VLANs...)
		l.DHCP = l.DHCP || in.DHCP
		l.Ignore = l.Ignore || in.Ignore
		keep(&l.MTU, in.MTU)
		keep(&l.Bond, in.Bond)
		keep(&l.VIP, in.VIP)
		keep(&l.WireGuard, in.WireGuard)
	}
	return links
}

// keep sets *v if it isn't set yet.
func keep[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}

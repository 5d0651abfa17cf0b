package network

import (
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// HasWay reports whether a node with the links that it has now would still have a way to an address with these settings.
// It is true while the links aren't known.
func HasWay(s *resource.Store, n config.Network) bool {
	all := Links.List(s)
	if len(all) == 0 {
		return true
	}
	links := n.Links()
	listed := map[string]bool{}
	apart := func(l config.Link) bool { // in a VRF, where nobody reaches the machine API
		return slices.ContainsFunc(links, func(v config.Link) bool { return v.VRF != nil && slices.Contains(v.VRF.Interfaces, l.Name) })
	}
	for _, l := range links {
		listed[l.Name] = true
		here := slices.ContainsFunc(all, func(o resource.Object[LinkStatus]) bool { return isLink(l, o) })
		if below := l.Below(); len(below) > 0 {
			here = slices.ContainsFunc(all, func(o resource.Object[LinkStatus]) bool { return slices.Contains(below, o.ID) })
		}
		for _, m := range l.Members() {
			listed[m] = true
		}
		vlan := slices.ContainsFunc(l.VLANs, func(v config.VLAN) bool { return v.DHCP || v.CIDR.IsValid() })
		if here && !l.Ignore && !apart(l) && (l.DHCP || l.DHCP6 || len(l.Addresses) > 0 || vlan) {
			return true
		}
	}
	return slices.ContainsFunc(all, func(o resource.Object[LinkStatus]) bool {
		return o.Spec.Kind == "device" && o.ID != "lo" && o.Spec.State == "up" && !slices.ContainsFunc(links, func(l config.Link) bool { return isLink(l, o) || listed[o.ID] })
	})
}

func isLink(l config.Link, o resource.Object[LinkStatus]) bool {
	return l.Name == o.ID || l.Name != "" && l.Name == o.Spec.Alias || l.Selects(config.Card{Name: o.ID, HardwareAddr: o.Spec.MAC})
}

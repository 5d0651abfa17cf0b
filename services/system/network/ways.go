package network

import (
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// HasWay reports whether a node with the links that it has now would still have a way to an address with these settings: a link with a
// carrier, and a default route if it has one by its settings or a lease now. It is true if there is no link with a carrier: nothing can be lost.
func HasWay(s *resource.Store, n config.Network) bool {
	up := slices.DeleteFunc(Links.List(s), func(o resource.Object[LinkStatus]) bool { return o.Spec.State != "up" || o.ID == "lo" })
	if len(up) == 0 {
		return true
	}
	routed := !slices.ContainsFunc(Routes.List(s), func(o resource.Object[Object]) bool {
		return o.Spec.By != byKernel && o.Spec.Problem == "" && (strings.HasPrefix(o.Spec.What, "0.0.0.0/0 via ") || strings.HasPrefix(o.Spec.What, "::/0 via "))
	})
	name := func(l config.Link) string {
		for _, o := range up {
			if isLink(l, o) {
				return o.ID
			}
		}
		return l.Name
	}
	links := n.Links()
	for i, l := range links {
		links[i].Name = name(l)
	}
	plans, virtuals, members := expand(links, func(called string) string { return name(config.Link{Name: called, HardwareAddr: called}) })
	for _, o := range up {
		if o.Spec.Kind == "device" && !slices.ContainsFunc(plans, func(p config.Link) bool { return p.Name == o.ID }) {
			plans = append(plans, config.Link{Name: o.ID, DHCP: true})
		}
	}
	var plugged func(name string) bool
	plugged = func(name string) bool {
		if i := slices.IndexFunc(virtuals, func(v virtual) bool { return v.name == name }); i >= 0 {
			return slices.ContainsFunc(append(slices.Clip(virtuals[i].members), virtuals[i].below), plugged)
		}
		return slices.ContainsFunc(up, func(o resource.Object[LinkStatus]) bool { return o.ID == name })
	}
	way := false
	for _, p := range plans {
		if p.Ignore || p.Table != 0 || members[p.Name] != "" || !plugged(p.Name) { // in a VRF nobody reaches the machine API
			continue
		}
		way = way || p.DHCP || p.DHCP6 || len(p.Addresses) > 0 || p.Advertised() || p.AcceptRA != config.AdvertisementsOff &&
			slices.ContainsFunc(OnLinks.List(s), func(o resource.Object[Object]) bool { return o.Spec.By == byKernel && o.Spec.Link == p.Name })
		routed = routed || p.DHCP || slices.ContainsFunc(p.Routes, func(r config.Route) bool { return r.Network.Bits() == 0 && r.Gateway.IsValid() })
	}
	return way && routed
}

func isLink(l config.Link, o resource.Object[LinkStatus]) bool {
	return l.Name == o.ID || l.Name != "" && l.Name == o.Spec.Alias || l.Selects(config.Card{Name: o.ID, HardwareAddr: o.Spec.MAC})
}

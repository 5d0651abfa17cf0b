package config

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

const (
	localTable = 255  // of the kernel's own addresses (rt_tables)
	usualMTU   = 1500 // Ethernet's
)

func checkRoutes(r *report, where place, routes []Route) {
	for i, route := range routes {
		where := where.with(i)
		switch {
		case !route.Network.IsValid() || route.Network != route.Network.Masked():
		case route.Gateway.IsValid() && route.Gateway.Is4() != route.Network.Addr().Is4():
			r.bad(where.with("gateway"), "%s is of another address family than %s", route.Gateway, route.Network)
		case route.Gateway.IsMulticast() || route.Gateway.IsUnspecified():
			r.bad(where.with("gateway"), "%s can't be the address of a gateway; without gateway, the network is directly on the link", route.Gateway)
		case route.Source.IsValid() && route.Source.Is4() != route.Network.Addr().Is4():
			r.bad(where.with("source"), "%s is of another address family than %s", route.Source, route.Network)
		case route.Type != RouteUnicast && (route.Gateway.IsValid() || route.Source.IsValid()):
			r.bad(where.with("type"), "a route of type %s sends nothing, so it has neither gateway nor source", route.Type)
		case route.Table == localTable:
			r.bad(where.with("table"), "%d is the table of the kernel's own addresses; choose another one", localTable)
		}
	}
}

// checkNetwork requires that a network is written with its own address.
func checkNetwork(p netip.Prefix) error {
	if p != p.Masked() {
		return fmt.Errorf("%s has bits set outside of its prefix; did you mean %s", p, p.Masked())
	}
	return nil
}

func checkRules(c *Config, r *report) {
	for i, rule := range c.Machine.Network.Rules {
		if rule.From.IsValid() && rule.To.IsValid() && rule.From.Addr().Is4() != rule.To.Addr().Is4() {
			r.bad(at("machine", "network", "rules", i, "to"), "%s is of another address family than %s", rule.To, rule.From)
		}
	}
}

// segment is what the configuration has at one place for a link: an entry, or a VLAN in it.
type segment struct {
	where  place
	name   string // of the link, for users
	link   any    // identifies it
	cidr   netip.Prefix
	routes []Route
	all    Link // of all entries for the link
}

func segments(c *Config) (all []segment) {
	links, of := c.Machine.Network.entries()
	for i, in := range c.Machine.Network.Interfaces {
		link := links[of[i]]
		all = append(all, segment{interfaceAt(i), link.String(), of[i], in.CIDR, in.Routes, link})
		for j, v := range in.VLANs {
			own := Link{DHCP: v.DHCP, Routes: v.Routes}
			if v.CIDR.IsValid() {
				own.Addresses = []netip.Prefix{v.CIDR}
			}
			all = append(all, segment{interfaceAt(i, "vlans", j), fmt.Sprintf("VLAN %d of %s", v.ID, link), [2]int{of[i], v.ID}, v.CIDR, v.Routes, own})
		}
	}
	return all
}

// EntryOf is the place of an address, or of a route to a network by a gateway; "" if it has none.
func (c *Config) EntryOf(cidr netip.Prefix, way Route) string {
	for _, s := range segments(c) {
		if cidr.IsValid() && s.cidr == cidr {
			return s.where.String()
		}
		if i := slices.IndexFunc(s.routes, func(r Route) bool { return r.Network.Masked() == way.Network && r.Gateway == way.Gateway }); i >= 0 {
			return s.where.with("routes", i).String()
		}
	}
	return ""
}

// Ends are the network address of an IPv4 network and its broadcast address. Networks of one or two addresses have
// none.
func Ends(p netip.Prefix) (network, broadcast netip.Addr) {
	if !p.IsValid() || !p.Addr().Is4() || p.Bits() > 30 {
		return network, broadcast
	}
	last := p.Masked().Addr().As4()
	binary.BigEndian.PutUint32(last[:], binary.BigEndian.Uint32(last[:])|(1<<(32-p.Bits())-1))
	return p.Masked().Addr(), netip.AddrFrom4(last)
}

func checkAddresses(c *Config, r *report) {
	all, own := segments(c), map[netip.Addr]string{}
	for _, s := range all {
		addr := s.cidr.Addr()
		own[addr] = s.name
		if addr.IsMulticast() || addr.IsUnspecified() {
			r.bad(s.where.with("cidr"), "%s can't be the address of a host", addr)
		} else if _, broadcast := Ends(s.cidr); broadcast.IsValid() && addr == broadcast {
			r.bad(s.where.with("cidr"), "%s is the broadcast address of %s, which no host can have", broadcast, s.cidr.Masked())
		}
	}
	for _, s := range all {
		for i, route := range s.routes {
			where := s.where.with("routes", i, "gateway")
			if name, is := own[route.Gateway]; is && route.Gateway.IsValid() {
				r.bad(where, "%s is the address of this node itself, on %s: a gateway is another machine", route.Gateway, name)
			}
			for _, p := range s.all.Addresses {
				if network, broadcast := Ends(p); network.IsValid() && (route.Gateway == network || route.Gateway == broadcast) {
					r.bad(where, "%s is the first or the last address of %s, which no gateway can have", route.Gateway, p.Masked())
				}
			}
		}
	}
}

// warnAddresses: such an address can work, but it is mostly a mistake.
func warnAddresses(c *Config, r *report) {
	first := map[netip.Addr]segment{}
	for _, s := range segments(c) {
		addr, where := s.cidr.Addr(), s.where.with("cidr")
		if !addr.IsValid() {
			continue
		}
		if network, _ := Ends(s.cidr); addr == network || addr.Is6() && s.cidr.Bits() < 127 && s.cidr == s.cidr.Masked() {
			r.warn(where, "%s is the address of the network itself; did you mean %s/%d", s.cidr, addr.Next(), s.cidr.Bits())
		}
		other, twice := first[addr]
		if twice && other.link != s.link && !addr.IsLinkLocalUnicast() && !s.cidr.IsSingleIP() && !other.cidr.IsSingleIP() {
			r.warn(where, "%s is also the address of %s (%s): which link answers for it is open; remove one of them", addr, other.name, r.point(other.where))
		}
		first[addr] = s
		warnInside(c, r, where, addr)
	}
	for i, in := range c.Machine.Network.Interfaces {
		if in.VIP != nil {
			warnInside(c, r, interfaceAt(i, "vip", "ip"), in.VIP.IP)
		}
	}
	for i, server := range c.Machine.Network.Nameservers {
		warnInside(c, r, at("machine", "network", "nameservers", i), server)
	}
	if addr, err := netip.ParseAddr(c.Cluster.ControlPlane.Endpoint.Hostname()); err == nil {
		warnInside(c, r, at("cluster", "controlPlane", "endpoint"), addr)
	}
}

// warnInside: in the networks of pods and Services, an address is that of a pod or a Service.
func warnInside(c *Config, r *report, where place, addr netip.Addr) {
	for name, subnets := range map[string][]netip.Prefix{"podSubnets": c.Cluster.Network.PodSubnets, "serviceSubnets": c.Cluster.Network.ServiceSubnets} {
		if i := slices.IndexFunc(subnets, func(p netip.Prefix) bool { return p.Contains(addr) }); i >= 0 {
			r.warn(where, "%s is inside of %s, one of cluster.network.%s: choose another address, or other subnets", addr, subnets[i], name)
		}
	}
}

// warnEntries finds entries that do something else than they seem to do.
func warnEntries(c *Config, r *report) {
	n := c.Machine.Network
	links, of := n.entries()
	names, members, vlans := cards(links), map[string]bool{}, map[string]place{}
	for i, in := range n.Interfaces {
		for _, below := range in.link().Below() {
			members[cmp.Or(names[below], below)] = true
		}
		for j, v := range in.VLANs {
			link, where := links[of[i]], interfaceAt(i, "vlans", j)
			vlans[VLANName(link.Name, v.ID)] = where
			if v.MTU > usualMTU && link.MTU == 0 {
				r.warn(where.with("mtu"), "%d is larger than %d, which a card has without mtu; set mtu of %s", v.MTU, usualMTU, link)
			}
		}
	}
	for i, in := range n.Interfaces {
		link, first := links[of[i]], slices.Index(of, of[i]) == i
		parent, id := vlanOf(in.Name)
		made, isVLAN := vlans[in.Name]
		switch {
		case !first:
		case isVLAN:
			r.warn(interfaceAt(i), "%s is the link of %s: both entries are combined; keep its addresses and routes there", in.Name, r.point(made))
		case id > 0 && link.selector() == "" && len(link.Kinds()) == 0 && !link.Ignore:
			r.warn(interfaceAt(i), "nothing in this configuration makes %s: VLAN %d of %s is interface: %[3]s with vlans: [{vlanId: %[2]d}]", in.Name, id, parent)
		case link.Unaddressed() && !members[link.String()] && in.Name != loopback:
			r.warn(interfaceAt(i), "%s gets no address by DHCP: set dhcp, cidr or acceptRA; only interfaces that aren't listed have DHCP by themselves", link)
		}
		if in.DHCPOptions != (DHCPOptions{}) && !link.DHCP {
			r.warn(interfaceAt(i, "dhcpOptions"), "have no effect without dhcp: true")
		}
	}
}

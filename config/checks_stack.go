package config

import (
	"cmp"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// cards are the names of the links in messages by what others may call them: a name, an alias or a MAC address.
func cards(links []Link) map[string]string {
	names := map[string]string{}
	for _, l := range links {
		names[l.HardwareAddr] = l.String()
	}
	for _, l := range links {
		names[l.Name] = l.String()
	}
	return names
}

// maxStack is how many links can be on top of each other (MAX_NEST_DEV of the kernel).
const maxStack = 8

// stack is how the links are on top of each other, by their names in messages.
type stack struct {
	names   map[string]string   // see cards
	below   map[string][]string // by link: those below it
	mtus    map[string]int      // of those that say one
	masters map[string]string   // by member: its bond, bridge or VRF
	bare    map[string]string   // by member without addresses: the kind of its master
	made    map[string]string   // by link that another link's entry makes: its kind
	deep    map[string]bool     // links that have too many others below them, or themselves
}

func stackOf(links []Link) stack {
	s := stack{cards(links), map[string][]string{}, map[string]int{}, map[string]string{}, map[string]string{}, map[string]string{}, nil}
	for _, l := range links {
		name := l.String()
		s.mtus[name] = l.MTU
		for _, b := range l.Below() {
			if b != "" {
				s.below[name] = append(s.below[name], s.name(b))
			}
		}
		for _, v := range l.VLANs {
			vlan := VLANName(name, v.ID)
			s.below[vlan], s.made[vlan] = append(s.below[vlan], name), "vlan"
			s.mtus[vlan] = cmp.Or(s.mtus[vlan], v.MTU, l.MTU)
		}
		if l.Veth != nil {
			s.made[l.Veth.Peer] = "veth"
		}
	}
	for level := range maxStack + 1 {
		next := map[string]bool{}
		for link, below := range s.below {
			if level == 0 || slices.ContainsFunc(below, func(b string) bool { return s.deep[b] }) {
				next[link] = true
			}
		}
		s.deep = next
	}
	return s
}

// name is the one name of a link.
func (s stack) name(called string) string { return cmp.Or(s.names[called], called) }

// checkStack requires that links can be on top of each other.
func checkStack(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	s := stackOf(links)
	for i, in := range c.Machine.Network.Interfaces {
		own, all := in.link().Kinds(), links[of[i]].Kinds()
		switch {
		case len(own) == 0:
		case len(all) > 1:
			r.bad(interfaceAt(i), "%s can't be a %s at once; give each a name of its own", links[of[i]], strings.Join(all, " and a "))
		case s.made[in.Name] == "veth":
			r.bad(interfaceAt(i, "interface"), "%s is a %s here, and the other end of a veth, too; choose another name", quote(in.Name), own[0])
		default:
			s.checkBelow(r, i, in.link(), own[0])
		}
		for j, v := range in.VLANs {
			below := links[of[i]].String()
			s.checkSizes(r, interfaceAt(i, "vlans", j, "mtu"), s.mtus[VLANName(below, v.ID)], below)
		}
		if v := in.VRF; v != nil && v.Table >= 253 && v.Table <= 255 {
			r.bad(interfaceAt(i, "vrf", "table"), "%d is a table of the kernel itself; choose another one, such as 1000", v.Table)
		}
	}
	for i, in := range c.Machine.Network.Interfaces {
		if name := links[of[i]].String(); s.bare[name] != "" && in.addressed() {
			r.bad(interfaceAt(i, "interface"), "%s is a member of %s: addresses, DHCP, routes and VLANs belong to the %s",
				quote(name), s.masters[name], s.bare[name])
		}
		if m := in.MACVLAN; m != nil && s.bare[s.name(m.Interface)] != "" {
			r.bad(interfaceAt(i, "macvlan", "interface"), "%s is a member of %s: name that instead", quote(m.Interface), s.masters[s.name(m.Interface)])
		}
	}
}

// checkBelow looks at the links that the link of an entry names.
func (s stack) checkBelow(r *report, i int, l Link, kind string) {
	for j, called := range l.Below() {
		where, name := interfaceAt(i, kind, "interfaces", j), s.name(called)
		if l.MACVLAN != nil {
			where = interfaceAt(i, kind, "interface")
			s.checkSizes(r, interfaceAt(i, "mtu"), s.mtus[l.Name], name)
		}
		if called == "" {
			r.lacks(where, "")
			continue
		}
		if _, err := net.ParseMAC(called); err != nil {
			r.refuse(where, checkLinkName(called))
		}
		parent, id := vlanOf(name)
		_, listed := s.below[name]
		other, taken := s.masters[name]
		switch {
		case s.deep[l.Name] && s.deep[name]:
			r.bad(where, "%s is on top of itself, or of more than %d links: Linux allows neither", quote(called), maxStack)
			clear(s.deep) // once is enough
		case id > 0 && !listed && s.made[name] == "" && s.names[called] == "":
			r.bad(where, "nothing in this configuration makes %s: add vlans: [{vlanId: %d}] to interface: %s", quote(called), id, parent)
		case l.MACVLAN == nil && taken:
			r.bad(where, "%s is already a member of %s", quote(called), other)
		case (l.Bridge != nil || l.Bond != nil) && s.mtus[l.Name] > s.mtus[name] && s.mtus[name] != 0:
			r.bad(interfaceAt(i, "mtu"), "%d is larger than %d, the MTU of its port %s: packets would be lost there; raise that of %[3]s", s.mtus[l.Name], s.mtus[name], called)
		}
		if l.MACVLAN != nil {
			continue
		}
		if s.masters[name] = l.Name; l.VRF == nil {
			s.bare[name] = kind
		}
	}
}

// checkSizes requires that the packets of a link fit into those of the link below.
func (s stack) checkSizes(r *report, where place, mtu int, below string) {
	if most := s.mtus[below]; mtu > most && most != 0 {
		r.bad(where, "%d is larger than %d, the MTU of %s: Linux refuses that; raise that of %[3]s", mtu, most, below)
	}
}

func checkBonds(c *Config, r *report) {
	for i, in := range c.Machine.Network.Interfaces {
		b, where := in.Bond, interfaceAt(i, "bond")
		if b == nil {
			continue
		}
		for f, value := range reflect.ValueOf(*b).Fields() {
			if modes := f.Tag.Get("modes"); modes != "" && !value.IsZero() && !slices.Contains(strings.Split(modes, ", "), b.Mode) {
				r.bad(where.with(f.Tag.Get("yaml")), "is an option of %s, and the mode of %s is %s", modes, quote(in.Name), b.Mode)
			}
		}
		// Earlier releases took these two with each mode, and the kernel doesn't use them.
		if b.LACPRate == "fast" && b.Mode != "802.3ad" {
			r.warn(where.with("lacpRate"), "isn't used with mode %s; leave it out", b.Mode)
		}
		if b.XmitHashPolicy != "layer2" && !slices.Contains([]string{"802.3ad", "balance-xor", "balance-tlb"}, b.Mode) {
			r.warn(where.with("xmitHashPolicy"), "isn't used with mode %s; leave it out", b.Mode)
		}
		if b.Primary != "" {
			r.refuse(where.with("primary"), checkOneOf(b.Primary, b.Interfaces))
		}
		b.checkMonitor(r, where)
		if _, err := net.ParseMAC(b.ADActorSystem); b.ADActorSystem != "" && (err != nil || b.Mode != "802.3ad") {
			r.bad(where.with("adActorSystem"), "%s is not a MAC address for a bond of mode 802.3ad", quote(b.ADActorSystem))
		}
	}
}

// maxARPTargets is BOND_MAX_ARP_TARGETS of the kernel.
const maxARPTargets = 16

// checkMonitor requires one way to detect a failed link.
func (b Bond) checkMonitor(r *report, where place) {
	monitor := *b.MIIMon
	switch arp := b.ARPInterval != 0; {
	case arp && monitor != 0:
		r.bad(where.with("miimon"), "contradicts arpInterval: the kernel allows one of both")
	case arp && len(b.ARPIPTarget) == 0:
		r.lacks(where.with("arpIPTarget"), "arpInterval needs it")
	case !arp && len(b.ARPIPTarget) > 0 || len(b.ARPIPTarget) > maxARPTargets:
		r.bad(where.with("arpIPTarget"), "has %d addresses: arpInterval needs 1 to %d, which need arpInterval", len(b.ARPIPTarget), maxARPTargets)
	case slices.ContainsFunc(b.ARPIPTarget, netip.Addr.Is6):
		r.bad(where.with("arpIPTarget"), "must have IPv4 addresses only")
	case !arp && monitor == 0:
		r.bad(where.with("miimon"), "0 turns the link checks off: the bond would go on to use a member whose link has failed; leave it out for 100 ms")
	}
	for _, delay := range []struct {
		name string
		ms   int
	}{{"miimon", monitor}, {"updelay", b.UpDelay}, {"downdelay", b.DownDelay}, {"peerNotifyDelay", b.PeerNotifyDelay}} {
		switch {
		case delay.ms < 0:
			r.bad(where.with(delay.name), "must not be negative")
		case monitor == 0 && delay.ms > 0:
			r.warn(where.with(delay.name), "isn't used with arpInterval; leave it out")
		case monitor > 0 && delay.ms%monitor != 0:
			r.bad(where.with(delay.name), "%d ms is not a multiple of miimon, %d ms", delay.ms, monitor)
		}
	}
}

package config

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Link is everything that the configuration has for one link.
type Link struct {
	Name string // "" if only the next fields select the card

	// Alias is the name in the configuration, where networkd has replaced Name with the kernel's.
	Alias string

	HardwareAddr, Driver, BusPath string

	Addresses   []netip.Prefix
	MTU         int
	DHCP        bool
	DHCP6       bool
	Informed    bool // its routers say that DHCPv6 has what else a node needs; the configuration doesn't
	AcceptRA    Advertisements
	DHCPOptions DHCPOptions
	Required    bool
	Ignore      bool
	Ethernet    *Ethernet
	Routes      []Route
	Bond        *Bond
	Bridge      *Bridge
	VRF         *VRF
	MACVLAN     *MACVLAN
	Veth        *Veth
	Dummy       bool
	WireGuard   *WireGuard
	VLANs       []VLAN
	VIP         *VIP
	Table       uint32 // that of the VRF that it is in; networkd sets it
	By          string // the layer of settings that it is of; networkd sets it
}

// Card is a network card. HardwareAddr is its permanent address, or the current one of a card that has no permanent
// one.
type Card struct{ Name, HardwareAddr, Driver, BusPath string }

// Selects reports whether the link is this card. If something else than the name selects the card, the name is an
// alias.
func (l Link) Selects(c Card) bool {
	if l.selector() == "" {
		return l.Name == c.Name
	}
	return (l.HardwareAddr == "" || Matches(l.HardwareAddr, strings.ToLower(c.HardwareAddr))) &&
		(l.Driver == "" || Matches(l.Driver, c.Driver)) && (l.BusPath == "" || Matches(l.BusPath, c.BusPath))
}

// DefaultRoute is the way of a gateway's family to everywhere.
func DefaultRoute(gateway netip.Addr) Route {
	all := netip.IPv4Unspecified()
	if gateway.Is6() {
		all = netip.IPv6Unspecified()
	}
	return Route{Network: netip.PrefixFrom(all, 0), Gateway: gateway}
}

// Matches compares a text with one in which an asterisk stands for any characters.
func Matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(part)
	}
	return regexp.MustCompile(`^` + strings.Join(parts, `.*`) + `$`).MatchString(text)
}

// Unaddressed reports whether the entries of a link give no address to it, and to no link on top of it.
func (l Link) Unaddressed() bool {
	return len(l.Addresses)+len(l.VLANs) == 0 && !l.DHCP && !l.DHCP6 && !l.Advertised() && len(l.Kinds()) == 0 && !l.Ignore
}

// Advertised reports whether the configuration says that the link has addresses of router advertisements, and nothing
// of others.
func (l Link) Advertised() bool {
	return l.AcceptRA == AdvertisementsOn && len(l.Addresses) == 0 && !l.DHCP && !l.DHCP6
}

// String is the link in messages: its name, or what selects its card.
func (l Link) String() string { return cmp.Or(l.Name, l.selector()) }

func (l Link) selector() string {
	return Interface{HardwareAddr: l.HardwareAddr, Driver: l.Driver, BusPath: l.BusPath}.selector()
}

// selector is what chooses the card besides its name, "" for nothing.
func (in Interface) selector() string {
	var parts []string
	for _, p := range [][2]string{{"hardwareAddr ", in.HardwareAddr}, {"driver ", in.Driver}, {"busPath ", in.BusPath}} {
		if p[1] != "" {
			parts = append(parts, p[0]+p[1])
		}
	}
	return strings.Join(parts, ", ")
}

// hashDigits are enough for the few links of a node; checks refuse two links with one name.
const hashDigits = 4

// VLANName is the name of a VLAN's link. Linux accepts 15 bytes: if the parent's name is too long, a part of its hash
// takes the place of its end, so that parents whose names begin alike have other VLANs.
func VLANName(parent string, id int) string {
	suffix := "." + strconv.Itoa(id)
	if len(parent)+len(suffix) > maxLinkName {
		suffix = fmt.Sprintf("%x", sha256.Sum256([]byte(parent)))[:hashDigits] + suffix
		parent = strings.ToValidUTF8(parent[:max(0, maxLinkName-len(suffix))], "")
	}
	return parent + suffix
}

// vlanOf are the parent and the ID in the usual name of a VLAN's link; 0 for other names.
func vlanOf(name string) (parent string, id int) {
	i := max(strings.LastIndexByte(name, '.'), 0)
	id, err := strconv.Atoi(strings.TrimPrefix(name[i:], "."))
	if err != nil || i == 0 || id < 1 || id > maxVLAN {
		return "", 0
	}
	return name[:i], id
}

// Links merges the entries of each interface, in the order in which the
// interfaces are first named. Addresses, routes and VLANs are combined without
// duplicates. Of the other fields, a value that is set wins (checks refuse
// entries that disagree). The link of a VLAN that has an entry of its own has
// the settings of the VLAN, too.
func (n Network) Links() []Link {
	links, _ := n.entries()
	return links
}

// entries are the links, and which of them each entry is for. An entry without a name is for the link with the same
// selector.
func (n Network) entries() (links []Link, of []int) {
	names, places := map[string]string{}, map[string]int{}
	for _, in := range n.Interfaces {
		if in.Name != "" {
			names[in.selector()] = in.Name
		}
	}
	for _, in := range n.Interfaces {
		id := in.Name
		if by := in.selector(); id == "" && by != "" {
			id = cmp.Or(names[by], by)
		}
		i, known := places[id]
		if !known {
			i = len(links)
			places[id] = i
			links = append(links, Link{})
		}
		links[i].add(in)
		of = append(of, i)
	}
	for _, l := range links {
		for _, v := range l.VLANs {
			if own, known := places[VLANName(l.Name, v.ID)]; known && l.Name != "" {
				links[own].add(Interface{CIDR: v.CIDR, DHCP: v.DHCP, MTU: cmp.Or(v.MTU, l.MTU), Routes: v.Routes})
			}
		}
	}
	return links, of
}

func (l *Link) add(in Interface) {
	if in.CIDR.IsValid() && !slices.Contains(l.Addresses, in.CIDR) {
		l.Addresses = append(l.Addresses, in.CIDR)
	}
	for _, route := range in.Routes {
		if !slices.Contains(l.Routes, route) {
			l.Routes = append(l.Routes, route)
		}
	}
	l.VLANs = append(l.VLANs, in.VLANs...)
	keep(reflect.ValueOf(l).Elem(), reflect.ValueOf(in))
}

// keep sets the fields of a link that aren't set yet to those of an entry with the same names. Lists are joined by
// others.
func keep(link, entry reflect.Value) {
	for f, value := range entry.Fields() {
		switch to := link.FieldByName(f.Name); {
		case !to.IsValid() || to.Kind() == reflect.Slice:
		case to.Kind() == reflect.Struct:
			keep(to, value)
		case to.IsZero():
			to.Set(value)
		}
	}
}

// link is what the entry alone makes.
func (in Interface) link() (l Link) {
	l.add(in)
	return l
}

// addressed reports whether the entry gives the link addresses or routes.
func (in Interface) addressed() bool {
	return in.CIDR.IsValid() || in.DHCP || in.DHCP6 || in.AcceptRA == AdvertisementsOn || len(in.Routes)+len(in.VLANs) > 0
}

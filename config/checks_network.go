package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxLinkName is IFNAMSIZ without the final zero (linux/if.h).
	maxLinkName = 15
	// maxOption is what an option of DHCP holds (RFC 2132 §2), without the byte for its kind or length.
	maxOption = 254
	maxVLAN   = 4094 // IEEE 802.1Q: 4095 is reserved
)

// interfaceAt is the place of entry i.
func interfaceAt(i int, elems ...any) place {
	return at("machine", "network", "interfaces", i).with(elems...)
}

func checkInterfaces(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	ignored, aliases := map[int]bool{}, map[string]string{}
	for i, in := range c.Machine.Network.Interfaces {
		by, link, id := in.selector(), links[of[i]], of[i]
		if in.Name == "" && by == "" {
			r.lacks(interfaceAt(i, "interface"), "or hardwareAddr, driver or busPath, which select a card")
		}
		checkSelector(r, interfaceAt(i), in, link)
		card := cmp.Or(in.HardwareAddr, by)
		if other, twice := aliases[card]; twice && card != "" && other != link.String() {
			r.bad(interfaceAt(i), "%s selects the card of %s, too: give all entries of one card the same alias", card, other)
		}
		aliases[card] = link.String()
		checkRoutes(r, interfaceAt(i, "routes"), in.Routes)
		contradicts(r, interfaceAt(i), link, in, link, "HardwareAddr", "Driver", "BusPath", "MTU", "AcceptRA")
		o := in.DHCPOptions
		contradicts(r, interfaceAt(i, "dhcpOptions"), link, o, link.DHCPOptions, "RouteMetric", "RouteTable", "ClientIdentifier", "UserClass", "VendorClassIdentifier")
		if n := max(len(o.ClientIdentifier), len(o.UserClass), len(o.VendorClassIdentifier)); n > maxOption {
			r.bad(interfaceAt(i, "dhcpOptions"), "has a text of %d bytes, and an option holds %d at most: shorten it", n, maxOption)
		}
		says := in.addressed() || in.MTU != 0 || in.Required || in.AcceptRA != "" || in.DHCPOptions != DHCPOptions{} || in.VIP != nil || in.Ethernet != nil || len(in.link().Kinds()) > 0
		before, named := ignored[id]
		switch {
		case in.Ignore && says:
			r.bad(interfaceAt(i, "ignore"), "contradicts the rest of the entry: an ignored interface isn't configured")
		case named && before != in.Ignore:
			r.bad(interfaceAt(i), "contradicts an earlier entry for %s: one of them ignores it", link)
		case (in.DHCP6 || in.AcceptRA == AdvertisementsOn) && (in.Name == loopback || link.WireGuard != nil):
			r.bad(interfaceAt(i), "has dhcp6 or acceptRA, and there is no router on %s; leave them out", link)
		}
		ignored[id] = in.Ignore
	}
}

// hardwarePattern is a MAC address with asterisks.
var hardwarePattern = regexp.MustCompile(`^[0-9a-f:]*[*][0-9a-f:*]*$`)

// checkSelector requires one card, which is no link that the node makes.
func checkSelector(r *report, where place, in Interface, link Link) {
	mac, err := net.ParseMAC(in.HardwareAddr)
	switch {
	case in.HardwareAddr == "":
	case err != nil && !hardwarePattern.MatchString(in.HardwareAddr):
		r.bad(where.with("hardwareAddr"), "%s is not a MAC address, such as 02:ab:12:34:00:01, or 02:ab:* for all that begin so", quote(in.HardwareAddr))
	case err == nil && mac[0]&1 != 0:
		r.bad(where.with("hardwareAddr"), "%s is the address of a group, and no card has such an address", mac)
	}
	if by := in.selector(); by != "" && (len(link.Kinds()) > 0 || in.Name == loopback) {
		r.bad(where, "%s selects a card, and %s is none: the node makes it", by, link)
	}
}

// contradicts compares fields of an entry with those of the first entry for the same link that has them.
func contradicts(r *report, where place, link Link, entry, first any, fields ...string) {
	for _, name := range fields {
		f, _ := reflect.TypeOf(entry).FieldByName(name)
		value, before := reflect.ValueOf(entry).FieldByName(name), plainShow(reflect.ValueOf(first).FieldByName(name))
		if text := plainShow(value); !value.IsZero() && text != before {
			r.bad(where.with(f.Tag.Get("yaml")), "%s contradicts %s in an earlier entry for %s", text, before, link)
		}
	}
}

func checkLinkName(name string) error {
	switch {
	case len(name) > maxLinkName:
		return fmt.Errorf("%s is longer than the %d bytes that Linux allows", quote(name), maxLinkName)
	case strings.ContainsAny(name, "/: \t\n\"'") || name == "." || name == "..":
		return fmt.Errorf("%s can't be the name of an interface", quote(name))
	}
	return nil
}

func checkOneOf(value string, values []string) error {
	if !slices.Contains(values, value) {
		return fmt.Errorf("%s is not one of %s%s", quote(value), strings.Join(values, ", "), didYouMean(value, values))
	}
	return nil
}

func checkVLANs(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	type vlan struct{ link, id int }
	seen, names, owns := map[vlan]bool{}, map[string]place{}, map[string]int{}
	for i, l := range links {
		owns[l.Name] = i
	}
	for i, in := range c.Machine.Network.Interfaces {
		for j, v := range in.VLANs {
			where, link, name := interfaceAt(i, "vlans", j), links[of[i]], VLANName(links[of[i]].Name, v.ID)
			first, taken := names[name]
			own, listed := owns[name]
			switch {
			case seen[vlan{of[i], v.ID}]:
				r.bad(where.with("vlanId"), "%d is given twice for %s", v.ID, link)
			case taken && link.Name != "":
				r.bad(where.with("vlanId"), "the link of this VLAN would be %s, and so would that of %s: choose another name for one of the interfaces", name, r.point(first))
			case listed && (link.selector()+links[own].selector() != "" || len(links[own].Kinds()) > 0):
				r.bad(where.with("vlanId"), "the link of this VLAN would be %s, and %s is for a link of this name: keep only one of them", name, r.point(interfaceAt(slices.Index(of, own))))
			}
			seen[vlan{of[i], v.ID}], names[name] = true, where
			checkRoutes(r, where.with("routes"), v.Routes)
		}
	}
}

func checkVIP(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	taken := map[netip.Addr]string{} // the nodes' own addresses, and the shared addresses seen so far
	for _, in := range c.Machine.Network.Interfaces {
		taken[in.CIDR.Addr()] = in.Name
	}
	for i, in := range c.Machine.Network.Interfaces {
		if in.VIP == nil {
			continue
		}
		if c.Machine.Type == Worker {
			r.bad(interfaceAt(i, "vip"), "is for control planes; this is a worker")
		}
		if in.WireGuard != nil {
			r.bad(interfaceAt(i, "vip"), "isn't possible on WireGuard, which has no neighbour discovery")
		}
		if links[of[i]].Name == "" {
			r.lacks(interfaceAt(i, "interface"), "an alias for the card: commands show the shared address with the name of its link")
		}
		where, ip := interfaceAt(i, "vip", "ip"), in.VIP.IP
		switch other, is := taken[ip]; {
		case !ip.IsValid():
		case !ip.IsGlobalUnicast() || ip.Is4In6() || ip.Zone() != "":
			r.bad(where, "%s is not an address at which other hosts can reach a machine: it must be an IPv4 or a global IPv6 address", ip)
		case is && other == in.Name:
			r.bad(where, "%s is also an address of the interface: it must be unused, because it moves between nodes", ip)
		case is:
			r.bad(where, "%s is also an address of %s: it must be unused, because it moves between nodes", ip, other)
		default:
			taken[ip] = in.Name
		}
	}
}

// checkEndpointOfPeer requires a host and a port.
func checkEndpointOfPeer(endpoint string) error {
	if err := lacksColon(endpoint); err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(endpoint)
	if n, portErr := strconv.Atoi(port); err != nil || portErr != nil || n < 1 || n > maxPort {
		return fmt.Errorf("%s is not host:port", quote(endpoint))
	}
	return checkHost(host)
}

const (
	// maxServiceBits is kube-apiserver's limit on a service subnet's host bits.
	maxServiceBits = 20
	// minPodBits leaves room for two nodes: each node gets a /24.
	minPodBits4, minPodBits6 = 9, 65
	// maxPodBits6 is kube-controller-manager's limit on an IPv6 subnet of pods: 2^16 nodes, with a /64 each.
	maxPodBits6 = 80
)

func checkSubnets(c *Config, r *report) {
	net := c.Cluster.Network
	_, ownMask := c.Cluster.ControllerManager.ExtraArgs["node-cidr-mask-size-ipv6"]
	for _, s := range []struct {
		name    string
		subnets []netip.Prefix
	}{{"podSubnets", net.PodSubnets}, {"serviceSubnets", net.ServiceSubnets}} {
		where := at("cluster", "network", s.name)
		for i, subnet := range s.subnets {
			bits := subnet.Addr().BitLen() - subnet.Bits()
			switch {
			case !subnet.IsValid() || subnet != subnet.Masked():
			case s.name == "serviceSubnets" && bits > maxServiceBits:
				r.bad(where.with(i), "%s is larger than kube-apiserver allows; use a prefix length of %d or more", subnet, subnet.Addr().BitLen()-maxServiceBits)
			case s.name == "podSubnets" && bits < podBits(subnet):
				r.bad(where.with(i), "%s is too small for the pods of two nodes; use a prefix length of %d or less", subnet, subnet.Addr().BitLen()-podBits(subnet))
			case s.name == "podSubnets" && subnet.Addr().Is6() && bits > maxPodBits6 && !ownMask:
				r.bad(where.with(i), "%s is larger than kube-controller-manager allows; use a prefix length of %d or more", subnet, subnet.Addr().BitLen()-maxPodBits6)
			}
		}
		if len(s.subnets) > 2 || len(s.subnets) == 2 && s.subnets[0].Addr().Is4() == s.subnets[1].Addr().Is4() {
			r.bad(where, "holds more than one subnet of an address family")
			return
		}
	}
	for i, pods := range net.PodSubnets {
		for _, services := range net.ServiceSubnets {
			if pods.Overlaps(services) {
				r.bad(at("cluster", "network", "podSubnets", i), "%s overlaps the service subnet %s", pods, services)
			}
		}
	}
}

func podBits(subnet netip.Prefix) int {
	if subnet.Addr().Is4() {
		return minPodBits4
	}
	return minPodBits6
}

func checkCNI(c *Config, r *report) {
	cni := c.Cluster.Network.CNI
	where := at("cluster", "network", "cni", "urls")
	switch {
	case cni.Name == CNICustom && len(cni.URLs) == 0:
		r.lacks(where, "a custom CNI needs at least one")
	case cni.Name != CNICustom && len(cni.URLs) > 0:
		r.bad(where, "contradicts name %s; did you mean name %s", cni.Name, CNICustom)
	}
	if c.Cluster.Network.Policies && cni.Name != CNIFlannel {
		r.warn(at("cluster", "network", "policies"), "is tested with the CNI %s only: a network that enforces NetworkPolicies by itself needs no second one for that", CNIFlannel)
	}
}

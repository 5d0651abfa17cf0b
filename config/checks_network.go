package config

import (
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxLinkName is IFNAMSIZ without the final zero (linux/if.h).
	maxLinkName = 15
	// minMTU is the minimum of IPv4 (RFC 791), maxMTU the maximum of the kernel.
	minMTU, maxMTU = 68, 65535
	maxVLAN        = 4094 // IEEE 802.1Q: 4095 is reserved
	// maxHostname is the limit of Linux and of a DNS label.
	maxHostname = 63
	maxDNSName  = 253
)

var (
	dnsName   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	bondModes = []string{"balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb"}
	lacpRates = []string{"slow", "fast"}
	hashes    = []string{"layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac"}
)

func isDNSName(name string) bool { return len(name) <= maxDNSName && dnsName.MatchString(name) }

// checkHost requires a DNS name or an IP address.
func checkHost(r *report, where place, host string) {
	if _, err := netip.ParseAddr(host); err != nil && !isDNSName(strings.ToLower(host)) {
		r.bad(where, "%s is neither a DNS name nor an IP address", quote(host))
	}
}

func checkHostname(c *Config, r *report) {
	name := c.Machine.Network.Hostname
	if name != "" && (len(name) > maxHostname || !dnsName.MatchString(name)) {
		r.bad(at("machine", "network", "hostname"), "%s must be of lower-case letters, digits, dashes and dots, %d at most: Kubernetes names the node after it", quote(name), maxHostname)
	}
	if domain := c.Cluster.Network.DNSDomain; !isDNSName(domain) {
		r.bad(at("cluster", "network", "dnsDomain"), "%s is not a DNS name", quote(domain))
	}
	for i, server := range c.Machine.Network.Nameservers {
		if server.IsUnspecified() || server.IsMulticast() {
			r.bad(at("machine", "network", "nameservers", i), "%s can't be the address of a server", server)
		}
	}
}

// interfaceAt is the place of entry i.
func interfaceAt(i int, elems ...any) place {
	return at("machine", "network", "interfaces", i).with(elems...)
}

func checkInterfaces(c *Config, r *report) {
	mtus, ignored := map[string]int{}, map[string]bool{}
	for i, in := range c.Machine.Network.Interfaces {
		checkLinkName(r, interfaceAt(i, "interface"), in.Name)
		checkMTU(r, interfaceAt(i, "mtu"), in.MTU)
		checkRoutes(r, interfaceAt(i, "routes"), in.Routes)
		if old := mtus[in.Name]; old != 0 && in.MTU != 0 && old != in.MTU {
			r.bad(interfaceAt(i, "mtu"), "%d contradicts %d in an earlier entry for %s", in.MTU, old, in.Name)
		}
		keepIn(mtus, in.Name, in.MTU)
		says := in.DHCP || in.CIDR.IsValid() || in.MTU != 0 || len(in.Routes)+len(in.VLANs) > 0 || in.Bond != nil || in.VIP != nil || in.WireGuard != nil
		before, named := ignored[in.Name]
		switch {
		case in.Ignore && says:
			r.bad(interfaceAt(i, "ignore"), "contradicts the rest of the entry: an ignored interface isn't configured")
		case named && before != in.Ignore:
			r.bad(interfaceAt(i), "contradicts an earlier entry for %s: one of them ignores it", in.Name)
		}
		ignored[in.Name] = in.Ignore
	}
}

func keepIn(m map[string]int, key string, v int) {
	if v != 0 {
		m[key] = v
	}
}

func checkLinkName(r *report, where place, name string) {
	switch {
	case name == "":
		r.lacks(where, "")
	case len(name) > maxLinkName:
		r.bad(where, "%s is longer than the %d bytes that Linux allows", quote(name), maxLinkName)
	case strings.ContainsAny(name, "/: \t\n\"'") || name == "." || name == "..":
		r.bad(where, "%s can't be the name of an interface", quote(name))
	}
}

func checkMTU(r *report, where place, mtu int) {
	if mtu != 0 && (mtu < minMTU || mtu > maxMTU) {
		r.bad(where, "%d is out of range (%d to %d bytes)", mtu, minMTU, maxMTU)
	}
}

func checkRoutes(r *report, where place, routes []Route) {
	for i, route := range routes {
		switch {
		case !route.Network.IsValid():
			r.lacks(where.with(i, "network"), "0.0.0.0/0 is the default route")
		case route.Network != route.Network.Masked():
			r.bad(where.with(i, "network"), "%s has bits set outside of its prefix; did you mean %s", route.Network, route.Network.Masked())
		case route.Gateway.IsValid() && route.Gateway.Is4() != route.Network.Addr().Is4():
			r.bad(where.with(i, "gateway"), "%s is of another address family than %s", route.Gateway, route.Network)
		}
	}
}

func checkBonds(c *Config, r *report) {
	masters := map[string]string{}
	for i, in := range c.Machine.Network.Interfaces {
		b := in.Bond
		if b == nil {
			continue
		}
		oneOf(r, interfaceAt(i, "bond", "mode"), b.Mode, bondModes)
		oneOf(r, interfaceAt(i, "bond", "lacpRate"), b.LACPRate, lacpRates)
		oneOf(r, interfaceAt(i, "bond", "xmitHashPolicy"), b.XmitHashPolicy, hashes)
		monitor := *b.MIIMon
		if monitor == 0 {
			r.bad(interfaceAt(i, "bond", "miimon"), "0 turns the link checks off: the bond would go on to use a member whose link has failed; leave it out for %d ms", defaultMIIMon)
		}
		for _, delay := range []struct {
			name string
			ms   int
		}{{"miimon", monitor}, {"updelay", b.UpDelay}, {"downdelay", b.DownDelay}} {
			switch {
			case delay.ms < 0:
				r.bad(interfaceAt(i, "bond", delay.name), "must not be negative")
			case monitor > 0 && delay.ms%monitor != 0:
				r.bad(interfaceAt(i, "bond", delay.name), "%d ms is not a multiple of miimon, %d ms", delay.ms, monitor)
			}
		}
		if len(b.Interfaces) == 0 {
			r.lacks(interfaceAt(i, "bond", "interfaces"), "a bond needs members")
		}
		for j, member := range b.Interfaces {
			where := interfaceAt(i, "bond", "interfaces", j)
			checkLinkName(r, where, member)
			if other, twice := masters[member]; twice {
				r.bad(where, "%s is already a member of %s", quote(member), other)
			} else if member == in.Name {
				r.bad(where, "a bond can't be its own member")
			}
			masters[member] = in.Name
		}
	}
	for i, in := range c.Machine.Network.Interfaces {
		if master := masters[in.Name]; master != "" && (in.CIDR.IsValid() || in.DHCP || len(in.Routes) > 0 || len(in.VLANs) > 0) {
			r.bad(interfaceAt(i, "interface"), "%s is a member of %s: addresses, DHCP, routes and VLANs belong to the bond", quote(in.Name), master)
		}
	}
}

func oneOf(r *report, where place, value string, values []string) {
	if !slices.Contains(values, value) {
		r.bad(where, "%s is not one of %s%s", quote(value), strings.Join(values, ", "), didYouMean(value, values))
	}
}

func checkVLANs(c *Config, r *report) {
	type link struct {
		parent string
		id     int
	}
	seen := map[link]bool{}
	for i, in := range c.Machine.Network.Interfaces {
		for j, v := range in.VLANs {
			where := interfaceAt(i, "vlans", j)
			switch {
			case v.ID < 1 || v.ID > maxVLAN:
				r.bad(where.with("vlanId"), "%d is out of range (1 to %d)", v.ID, maxVLAN)
			case seen[link{in.Name, v.ID}]:
				r.bad(where.with("vlanId"), "%d is given twice for %s", v.ID, in.Name)
			}
			seen[link{in.Name, v.ID}] = true
			checkMTU(r, where.with("mtu"), v.MTU)
			checkRoutes(r, where.with("routes"), v.Routes)
		}
	}
}

func checkVIP(c *Config, r *report) {
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
		where, ip := interfaceAt(i, "vip", "ip"), in.VIP.IP
		switch other, is := taken[ip]; {
		case !ip.IsValid():
			r.lacks(where, "")
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

// dottedPort is an endpoint with a dot instead of a colon before the port.
var dottedPort = regexp.MustCompile(`^(\d+\.\d+\.\d+\.\d+)\.(\d+)$`)

func checkWireGuard(c *Config, r *report) {
	for i, in := range c.Machine.Network.Interfaces {
		w := in.WireGuard
		if w == nil {
			continue
		}
		where := interfaceAt(i, "wireguard")
		if w.PrivateKey == "" {
			r.lacks(where.with("privateKey"), "")
		} else if !isKey32(string(w.PrivateKey)) {
			r.bad(where.with("privateKey"), "must be base64 of 32 bytes, as wg genkey prints it")
		}
		if w.ListenPort < 0 || w.ListenPort > maxPort {
			r.bad(where.with("listenPort"), "%d is not a port (1 to %d)", w.ListenPort, maxPort)
		}
		for j, p := range w.Peers {
			checkPeer(r, where.with("peers", j), p)
		}
	}
}

func checkPeer(r *report, where place, p WireGuardPeer) {
	if p.PublicKey == "" {
		r.lacks(where.with("publicKey"), "")
	} else if !isKey32(p.PublicKey) {
		r.bad(where.with("publicKey"), "must be base64 of 32 bytes, as wg pubkey prints it")
	}
	if p.Endpoint == "" {
		return
	}
	if m := dottedPort.FindStringSubmatch(p.Endpoint); m != nil {
		r.bad(where.with("endpoint"), "%s lacks a colon before the port; did you mean %s:%s", quote(p.Endpoint), m[1], m[2])
		return
	}
	host, port, err := net.SplitHostPort(p.Endpoint)
	if n, portErr := strconv.Atoi(port); err != nil || portErr != nil || n < 1 || n > maxPort {
		r.bad(where.with("endpoint"), "%s is not host:port", quote(p.Endpoint))
		return
	}
	checkHost(r, where.with("endpoint"), host)
}

func checkSANs(c *Config, r *report) {
	for _, s := range []struct {
		where place
		names []string
	}{{at("machine", "certSANs"), c.Machine.CertSANs}, {at("cluster", "apiServer", "certSANs"), c.Cluster.APIServer.CertSANs}} {
		for i, name := range s.names {
			checkHost(r, s.where.with(i), strings.TrimPrefix(name, "*."))
		}
	}
}

const (
	// maxServiceBits is kube-apiserver's limit on a service subnet's host bits.
	maxServiceBits = 20
	// minPodBits leaves room for two nodes: each node gets a /24.
	minPodBits4, minPodBits6 = 9, 65
)

func checkSubnets(c *Config, r *report) {
	net := c.Cluster.Network
	for _, s := range []struct {
		name    string
		subnets []netip.Prefix
	}{{"podSubnets", net.PodSubnets}, {"serviceSubnets", net.ServiceSubnets}} {
		where := at("cluster", "network", s.name)
		for i, subnet := range s.subnets {
			bits := subnet.Addr().BitLen() - subnet.Bits()
			switch {
			case !subnet.IsValid():
			case subnet != subnet.Masked():
				r.bad(where.with(i), "%s has bits set outside of its prefix; did you mean %s", subnet, subnet.Masked())
			case s.name == "serviceSubnets" && bits > maxServiceBits:
				r.bad(where.with(i), "%s is larger than kube-apiserver allows; use a prefix length of %d or more", subnet, subnet.Addr().BitLen()-maxServiceBits)
			case s.name == "podSubnets" && bits < podBits(subnet):
				r.bad(where.with(i), "%s is too small for the pods of two nodes; use a prefix length of %d or less", subnet, subnet.Addr().BitLen()-podBits(subnet))
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
	for i, u := range cni.URLs {
		checkDocument(r, where.with(i), u)
	}
}

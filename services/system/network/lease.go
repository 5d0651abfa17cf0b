package network

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// fallbackLeaseTime is for servers that forget option 51, which RFC 2131
	// §4.3.1 makes them send.
	fallbackLeaseTime = time.Hour
	// minMTU is what every IPv4 host must take (RFC 791 §3.1): smaller values in
	// option 26 are mistakes that would cut the node off.
	minMTU = 576
	// infiniteLease is the lease time that never ends (RFC 2131 §3.3).
	infiniteLease = 0xffffffff * time.Second
)

// lease is what a DHCP server has granted. Times are on the monotonic clock, so
// that setting the wall clock neither ends nor lengthens a lease.
type lease struct {
	ack     *dhcpv4.DHCPv4
	address netip.Prefix
	server  netip.Addr // unspecified where the server doesn't say who it is

	renewAt, rebindAt, expireAt time.Time // zero: never

	mtu       int // 0: not offered
	routes    []route
	resolvers []netip.Addr
	ntp       []netip.Addr
	hostname  string
}

// newLease reads an ACK. asked is when the request was sent: the times count
// from there (RFC 2131 §4.4.1).
func newLease(ack *dhcpv4.DHCPv4, asked time.Time) (*lease, error) {
	addr, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	if !ok || !addr.IsGlobalUnicast() {
		return nil, fmt.Errorf("DHCP server granted no usable address: %s", ack.YourIPAddr)
	}
	mask := ack.SubnetMask()
	if mask == nil {
		mask = net.IP(addr.AsSlice()).DefaultMask()
	}
	ones, bits := mask.Size()
	if bits != 32 {
		return nil, fmt.Errorf("DHCP server granted %s with mask %s, which is none", addr, mask)
	}
	l := &lease{
		ack:      ack,
		address:  netip.PrefixFrom(addr, ones),
		server:   address(ack.ServerIdentifier()),
		hostname: ack.HostName(),
		routes:   leaseRoutes(ack),
	}
	if l.server.IsUnspecified() {
		l.server = address(ack.ServerIPAddr)
	}
	for _, ip := range ack.DNS() {
		l.resolvers = append(l.resolvers, address(ip))
	}
	for _, ip := range ack.NTPServers() {
		l.ntp = append(l.ntp, address(ip))
	}
	if v := ack.Options.Get(dhcpv4.OptionInterfaceMTU); len(v) == 2 {
		if mtu := int(v[0])<<8 | int(v[1]); mtu >= minMTU {
			l.mtu = mtu
		}
	}
	l.setTimes(ack, asked)
	return l, nil
}

func (l *lease) setTimes(ack *dhcpv4.DHCPv4, asked time.Time) {
	length := ack.IPAddressLeaseTime(fallbackLeaseTime)
	if length >= infiniteLease {
		return
	}
	// The defaults of RFC 2131 §4.4.5, also where the server's make no sense.
	t1 := ack.IPAddressRenewalTime(length / 2)
	t2 := ack.IPAddressRebindingTime(length * 7 / 8)
	if t1 <= 0 || t1 >= t2 || t2 >= length {
		t1, t2 = length/2, length*7/8
	}
	l.renewAt, l.rebindAt, l.expireAt = asked.Add(t1), asked.Add(t2), asked.Add(length)
}

// leaseRoutes are the classless routes (option 121), or else the routers: who
// sends the first wants the second ignored (RFC 3442).
func leaseRoutes(ack *dhcpv4.DHCPv4) []route {
	var out []route
	for _, r := range ack.ClasslessStaticRoute() {
		ones, _ := r.Dest.Mask.Size()
		gw := address(r.Router)
		if gw.IsUnspecified() {
			gw = netip.Addr{} // on the link itself
		}
		out = append(out, route{network: netip.PrefixFrom(address(r.Dest.IP), ones).Masked(), gateway: gw})
	}
	if len(out) > 0 {
		return out
	}
	if routers := ack.Router(); len(routers) > 0 && !routers[0].IsUnspecified() {
		return []route{{network: netip.PrefixFrom(netip.IPv4Unspecified(), 0), gateway: address(routers[0])}}
	}
	return nil
}

// address is 0.0.0.0 for anything that isn't an IPv4 address.
func address(ip net.IP) netip.Addr {
	a, ok := netip.AddrFromSlice(ip.To4())
	if !ok {
		return netip.IPv4Unspecified()
	}
	return a
}

package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/sys/unix"
)

const (
	// fallbackLeaseTime is for servers that don't send option 51, although RFC
	// 2131 §4.3.1 demands it.
	fallbackLeaseTime = time.Hour
	// minMTU is the MTU that every IPv4 host must support (RFC 791 §3.1). Smaller
	// values in option 26 are mistakes that would disconnect the node.
	minMTU = 576
	// infiniteLease is the lease time without an end (RFC 2131 §3.3).
	infiniteLease = 0xffffffff * time.Second
)

// dhcp is the protocol for IPv4 (RFC 2131) on one link.
//
// Before there is an address, messages use a packet socket. To extend a lease
// they are sent from the address itself, over the kernel's own UDP. The node
// sends no client identifier: servers then identify it by its MAC address, and
// reservations by MAC work.
type dhcp struct {
	link     string
	hostname func() string // sent if the configuration has one
}

// requested are the options that newLease reads.
var requested = []dhcpv4.OptionCode{
	dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter, dhcpv4.OptionDomainNameServer, dhcpv4.OptionHostName,
	dhcpv4.OptionInterfaceMTU, dhcpv4.OptionNTPServers, dhcpv4.OptionClasslessStaticRoute,
	dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue,
}

func (d dhcp) modifiers(more ...dhcpv4.Modifier) []dhcpv4.Modifier {
	m := []dhcpv4.Modifier{
		dhcpv4.WithRequestedOptions(requested...),
		dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize)),
	}
	if name := d.hostname(); name != "" {
		m = append(m, dhcpv4.WithOption(dhcpv4.OptHostName(name)))
	}
	return append(m, more...)
}

// acquire does discover, offer, request, ack.
func (d dhcp) acquire(ctx context.Context, prefer netip.Addr) (*lease, error) {
	var more []dhcpv4.Modifier
	if prefer.IsValid() {
		more = append(more, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(prefer.AsSlice())))
	}
	offer, err := d.raw(ctx, nclient4.IsMessageType(dhcpv4.MessageTypeOffer), func(mac net.HardwareAddr) (*dhcpv4.DHCPv4, error) {
		return dhcpv4.NewDiscovery(mac, d.modifiers(more...)...)
	})
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	ack, err := d.raw(ctx, answers(offer), func(net.HardwareAddr) (*dhcpv4.DHCPv4, error) {
		return dhcpv4.NewRequestFromOffer(offer, d.modifiers()...)
	})
	if err != nil {
		return nil, err
	}
	return newLease(ack, asked)
}

// raw sends over a packet socket: it works while the link has no address.
func (d dhcp) raw(ctx context.Context, match nclient4.Matcher, make func(net.HardwareAddr) (*dhcpv4.DHCPv4, error)) (*dhcpv4.DHCPv4, error) {
	c, err := nclient4.New(d.link, nclient4.WithRetry(1), nclient4.WithTimeout(answerWait))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	msg, err := make(c.InterfaceAddr())
	if err != nil {
		return nil, err
	}
	return send(ctx, c, nclient4.DefaultServers, msg, match)
}

// extend asks all servers if the server of the lease has no address.
func (d dhcp) extend(ctx context.Context, l *lease, rebind bool) (*lease, error) {
	asked, last := time.Now(), l.grant.(*dhcpv4.DHCPv4)
	iface, err := net.InterfaceByName(d.link)
	if err != nil {
		return nil, err
	}
	conn, err := d.listen(ctx, address(last.YourIPAddr))
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", last.YourIPAddr, err)
	}
	c, err := nclient4.NewWithConn(conn, iface.HardwareAddr, nclient4.WithRetry(1), nclient4.WithTimeout(answerWait))
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer c.Close()
	xid, err := dhcpv4.GenerateTransactionID()
	if err != nil {
		return nil, err
	}
	// It sets ciaddr, and omits the server identifier, as RFC 2131 §4.3.2 demands.
	msg, err := dhcpv4.NewRenewFromAck(last, d.modifiers(dhcpv4.WithTransactionID(xid))...)
	if err != nil {
		return nil, err
	}
	ack, err := send(ctx, c, extendAt(last, rebind), msg, nclient4.IsMessageType(dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak))
	if err != nil {
		return nil, err
	}
	return newLease(ack, asked)
}

// extendAt is where a lease is extended: at its server, or with rebind, or if
// that has no address, at any server.
func extendAt(ack *dhcpv4.DHCPv4, rebind bool) *net.UDPAddr {
	server := serverOf(ack)
	if rebind || server.IsUnspecified() {
		return nclient4.DefaultServers
	}
	return &net.UDPAddr{IP: server.AsSlice(), Port: nclient4.ServerPort}
}

// fromAddress sends from one address, and receives what comes for any: servers send a
// refusal to all (RFC 2131 §4.1).
type fromAddress struct {
	*net.UDPConn
	control []byte // with the address
}

func (c fromAddress) WriteTo(b []byte, to net.Addr) (int, error) {
	n, _, err := c.WriteMsgUDP(b, c.control, to.(*net.UDPAddr))
	return n, err
}

// listen opens the client's port on this link only, to send from addr.
func (d dhcp) listen(ctx context.Context, addr netip.Addr) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var opt error
		err := raw.Control(func(fd uintptr) { opt = unix.BindToDevice(int(fd), d.link) })
		return errors.Join(err, opt)
	}}
	conn, err := lc.ListenPacket(ctx, "udp4", netip.AddrPortFrom(netip.IPv4Unspecified(), nclient4.ClientPort).String())
	if err != nil {
		return nil, err
	}
	return fromAddress{conn.(*net.UDPConn), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: addr.As4()})}, nil
}

func send(ctx context.Context, c *nclient4.Client, dest *net.UDPAddr, msg *dhcpv4.DHCPv4, match nclient4.Matcher) (*dhcpv4.DHCPv4, error) {
	answer, err := c.SendAndRead(ctx, dest, msg, match)
	switch {
	case errors.Is(err, nclient4.ErrNoResponse), errors.Is(err, context.DeadlineExceeded):
		return nil, errNoAnswer
	case err != nil:
		return nil, err
	case answer.MessageType() == dhcpv4.MessageTypeNak:
		if text := answer.Message(); text != "" {
			return nil, fmt.Errorf("%w (NAK): %s", errRefused, text)
		}
		return nil, fmt.Errorf("%w (NAK)", errRefused)
	}
	return answer, nil
}

// answers matches the answers of the offering server to a request. If a server
// sends 0.0.0.0 as its identifier, or none, its answers must have the same.
func answers(offer *dhcpv4.DHCPv4) nclient4.Matcher {
	server := address(offer.ServerIdentifier())
	return nclient4.IsAll(
		nclient4.IsMessageType(dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak),
		func(p *dhcpv4.DHCPv4) bool {
			from := address(p.ServerIdentifier())
			return from == server || from.IsUnspecified() || server.IsUnspecified()
		},
	)
}

// newLease reads an ACK. asked is when the request was sent: the times count
// from then (RFC 2131 §4.4.1).
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
	l := &lease{server: serverOf(ack).String(), hostname: ack.HostName(), routes: leaseRoutes(ack), grant: ack}
	l.setTimes(ack, asked)
	l.addresses = []leasedAddress{{netip.PrefixFrom(addr, ones), l.expireAt}}
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
	return l, nil
}

// serverOf is the server's address, or 0.0.0.0 if it has sent none.
func serverOf(ack *dhcpv4.DHCPv4) netip.Addr {
	if id := address(ack.ServerIdentifier()); !id.IsUnspecified() {
		return id
	}
	return address(ack.ServerIPAddr)
}

func (l *lease) setTimes(ack *dhcpv4.DHCPv4, asked time.Time) {
	length := ack.IPAddressLeaseTime(fallbackLeaseTime)
	if length >= infiniteLease {
		return
	}
	// The defaults of RFC 2131 §4.4.5 are also used if the server's values are invalid.
	t1 := ack.IPAddressRenewalTime(length / 2)
	t2 := ack.IPAddressRebindingTime(length * 7 / 8)
	if t1 <= 0 || t1 >= t2 || t2 >= length {
		t1, t2 = length/2, length*7/8
	}
	l.renewAt, l.rebindAt, l.expireAt = asked.Add(t1), asked.Add(t2), asked.Add(length)
}

// leaseRoutes are the classless routes (option 121), or else the routers: with
// the first, the second must be ignored (RFC 3442).
func leaseRoutes(ack *dhcpv4.DHCPv4) (out []route) {
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

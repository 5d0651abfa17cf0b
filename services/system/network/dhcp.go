package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/dhcpv6/nclient6"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
)

const (
	// fallbackLeaseTime is for servers that don't send option 51, although RFC
	// 2131 §4.3.1 demands it.
	fallbackLeaseTime = time.Hour
	// minMTU is the MTU that IPv6 needs (RFC 8200 §5). Smaller values in option 26 are mistakes: the
	// kernel would take the link's IPv6 away, or they would disconnect the node.
	minMTU = 1280
	// infiniteLease is the lease time without an end (RFC 2131 §3.3).
	infiniteLease = 0xffffffff * time.Second
	// vendorClass is option 60 by default: a server can tell nodes from other clients.
	vendorClass = "garboard"
)

// minLease is the shortest time of a lease, whatever the server says: each client asks servers at most that often.
var minLease = 20 * time.Second

// dhcp is the protocol for IPv4 (RFC 2131) on one link.
//
// Before there is an address, messages use a packet socket. To extend a lease
// they are sent from the address itself, over the kernel's own UDP. The node
// sends no client identifier: servers then identify it by its MAC address, and
// reservations by MAC work.
type dhcp struct {
	link     string
	options  config.DHCPOptions
	hostname func() string // sent if the configuration has one
}

// requested are the options that newLease reads.
var requested = []dhcpv4.OptionCode{
	dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter, dhcpv4.OptionDomainNameServer, dhcpv4.OptionHostName,
	dhcpv4.OptionInterfaceMTU, dhcpv4.OptionNTPServers, dhcpv4.OptionClasslessStaticRoute, dhcpv4.OptionStaticRoutingTable,
	dhcpv4.OptionDomainName, dhcpv4.OptionDNSDomainSearchList,
	dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue,
}

func (d dhcp) modifiers(more ...dhcpv4.Modifier) []dhcpv4.Modifier {
	m := []dhcpv4.Modifier{
		dhcpv4.WithRequestedOptions(requested...),
		dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize)),
		dhcpv4.WithOption(dhcpv4.OptClassIdentifier(cmp.Or(d.options.VendorClassIdentifier, vendorClass))),
		d.withID,
	}
	if class := d.options.UserClass; class != "" {
		m = append(m, dhcpv4.WithOption(dhcpv4.OptRFC3004UserClass([]string{class})))
	}
	if name := d.hostname(); name != "" {
		m = append(m, dhcpv4.WithOption(dhcpv4.OptHostName(name)))
	}
	return append(m, more...)
}

func (d dhcp) withID(m *dhcpv4.DHCPv4) {
	if id := d.options.ClientIdentifier; id != "" {
		m.UpdateOption(dhcpv4.OptClientIdentifier(append([]byte{0}, id...))) // type 0: a text (RFC 2132 §9.14)
	}
}

// acquire does discover, offer, request, ack.
func (d dhcp) acquire(ctx context.Context, prefer netip.Addr) (*lease, error) {
	var more []dhcpv4.Modifier
	if prefer.IsValid() {
		more = append(more, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(prefer.AsSlice())))
	}
	card, err := net.InterfaceByName(d.link)
	if err != nil {
		return nil, err
	}
	conn, err := nclient4.NewRawUDPConn(d.link, nclient4.ClientPort) // it works while the link has no address
	if err != nil {
		return nil, err
	}
	return over(conn, card.HardwareAddr, func(c *nclient4.Client) (*dhcpv4.DHCPv4, error) {
		offer, err := c.DiscoverOffer(ctx, d.modifiers(more...)...)
		if err != nil {
			return nil, err
		}
		granted, err := c.RequestFromOffer(ctx, offer, d.modifiers()...)
		if err != nil {
			return nil, err
		}
		return granted.ACK, nil
	})
}

// over asks over a connection, which it closes.
func over(conn net.PacketConn, mac net.HardwareAddr, ask func(c *nclient4.Client) (*dhcpv4.DHCPv4, error)) (*lease, error) {
	asked := time.Now()
	c, err := nclient4.NewWithConn(unfolding{conn}, mac, nclient4.WithRetry(1), nclient4.WithTimeout(answerWait))
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	defer c.Close()
	ack, err := ask(c)
	var refusal *nclient4.ErrNak
	switch {
	case errors.Is(err, nclient4.ErrNoResponse), errors.Is(err, context.DeadlineExceeded):
		return nil, errNoAnswer
	case errors.As(err, &refusal):
		return nil, fmt.Errorf("%w (NAK): %q", errRefused, refusal.Nak.Message())
	case err != nil:
		return nil, err
	}
	return newLease(ack, asked)
}

// unfolding is for servers with more options than fit into their place (option 52, RFC 2131 §4.1): the library reads
// only that.
type unfolding struct{ net.PacketConn }

func (c unfolding) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := c.PacketConn.ReadFrom(b)
	return unfold(b, n), from, err
}

// unfold moves the options in the fields file and sname of a message to the others, in the order of RFC 3396 §5.
func unfold(b []byte, n int) int {
	m, err := dhcpv4.FromBytes(b[:n])
	if err != nil || len(m.Options.Get(dhcpv4.OptionOptionOverload)) != 1 {
		return n
	}
	in := m.Options.Get(dhcpv4.OptionOptionOverload)[0]
	m.Options.Del(dhcpv4.OptionOptionOverload)
	for i, field := range [][]byte{b[108:236], b[44:108]} {
		if in>>i&1 == 1 {
			err = errors.Join(err, m.Options.FromBytes(field))
		}
	}
	if all := m.ToBytes(); err == nil && len(all) <= len(b) {
		n = copy(b, all)
	}
	return n
}

// extend asks all servers if the server of the lease has no address.
func (d dhcp) extend(ctx context.Context, l *lease, rebind bool) (*lease, error) {
	last := l.grant.(*dhcpv4.DHCPv4)
	// With ciaddr and without the server identifier, as RFC 2131 §4.3.2 demands.
	msg, err := dhcpv4.New(d.modifiers(dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(last.ClientHWAddr), dhcpv4.WithClientIP(last.YourIPAddr))...)
	if err != nil {
		return nil, err
	}
	// bound to the link
	conn, err := server4.NewIPv4UDPConn(d.link, &net.UDPAddr{Port: nclient4.ClientPort})
	if err != nil {
		return nil, err
	}
	from := fromAddress{conn, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: address4(last.YourIPAddr).As4()})}
	return over(from, last.ClientHWAddr, func(c *nclient4.Client) (*dhcpv4.DHCPv4, error) {
		ack, err := c.SendAndRead(ctx, extendAt(last, rebind), msg, nclient4.IsMessageType(dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak))
		if err == nil && ack.MessageType() == dhcpv4.MessageTypeNak {
			err = &nclient4.ErrNak{Nak: ack}
		}
		return ack, err
	})
}

// extendAt is where a lease is extended: at its server, or with rebind, or if
// that has no address, at any server.
func extendAt(ack *dhcpv4.DHCPv4, rebind bool) *net.UDPAddr {
	server := serverOf(ack)
	return either(rebind || server.IsUnspecified(), nclient4.DefaultServers, &net.UDPAddr{IP: server.AsSlice(), Port: nclient4.ServerPort})
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

// newLease reads an ACK. asked isn't after the request was sent, from which the times count (RFC 2131 §4.4.1).
func newLease(ack *dhcpv4.DHCPv4, asked time.Time) (*lease, error) {
	addr, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	if !ok || !addr.IsGlobalUnicast() {
		return nil, fmt.Errorf("DHCP server granted no usable address: %s", ack.YourIPAddr)
	}
	l := &lease{LeaseStatus: LeaseStatus{Server: serverOf(ack).String(), Hostname: ack.HostName()}, grant: ack}
	l.setTimes(asked, ack.IPAddressLeaseTime(fallbackLeaseTime), ack.IPAddressRenewalTime(0), ack.IPAddressRebindingTime(0))
	own := l.prefix(addr, ack.SubnetMask())
	if network, broadcast := config.Ends(own); addr == network || addr == broadcast {
		return nil, fmt.Errorf("DHCP server granted no usable address: no host can have %s", own)
	}
	l.addresses = []leasedAddress{{own, l.Expires}}
	l.routes = l.leaseRoutes(ack, own)
	l.Resolvers, l.ntp = l.servers("name server", ack.DNS()), l.servers("time server", ack.NTPServers())
	domains := []string{ack.DomainName()}
	if list := ack.DomainSearch(); list != nil {
		domains = list.Labels // option 119 is the better one
	}
	l.setSearch(domains)
	if size, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options); err == nil && size >= minMTU {
		l.mtu = int(size)
	} else if err == nil {
		l.leftOut("the MTU %d", size)
	}
	return l, nil
}

func (l *lease) setSearch(domains []string) {
	for _, d := range domains {
		if clean := cleanDomain(d); clean != "" {
			l.Search = append(l.Search, clean)
		} else if d != "" {
			l.leftOut("the domain %q", d)
		}
	}
}

// leftOut notes a value of the server that can't be.
func (l *lease) leftOut(format string, args ...any) {
	if len(l.Problems) < maxAdvertised {
		l.Problems = append(l.Problems, fmt.Sprintf(format, args...)+" can't be used, and is left out")
	}
}

// prefix is the address with its mask. Without one, and with one that can't be, the mask is that
// of the address's class.
func (l *lease) prefix(addr netip.Addr, mask net.IPMask) netip.Prefix {
	ones, bits := mask.Size()
	if mask != nil && (bits != 32 || ones < shortestMask) {
		l.leftOut("the mask %s", net.IP(mask))
		mask = nil
	}
	if mask == nil {
		ones, _ = net.IP(addr.AsSlice()).DefaultMask().Size()
	}
	return netip.PrefixFrom(addr, ones)
}

// shortestMask: no network is larger than one of class A (RFC 791).
const shortestMask = 8

// servers are those that other hosts can be.
func (l *lease) servers(what string, all []net.IP) (out []netip.Addr) {
	for _, ip := range all {
		switch a := addrOf(ip); {
		case a.IsGlobalUnicast():
			out = append(out, a)
		case a.Is6() && a.IsLinkLocalUnicast():
			out = append(out, a.WithZone(l.Link))
		default:
			l.leftOut("the %s %s", what, ip)
		}
	}
	return out
}

// serverOf is the server's address, or 0.0.0.0 if it has sent none.
func serverOf(ack *dhcpv4.DHCPv4) netip.Addr {
	id := address4(ack.ServerIdentifier())
	return either(id.IsUnspecified(), address4(ack.ServerIPAddr), id)
}

// setTimes sets the times of a lease of that length. T1 and T2 are a half and seven eighths of it (RFC 2131 §4.4.5)
// where the server has sent none, or such that can't be.
func (l *lease) setTimes(asked time.Time, length, t1, t2 time.Duration) {
	if length < minLease {
		l.leftOut("the lease time %s", length)
		length = minLease
	}
	if t1 < minLease/2 || t1 >= t2 || t2 >= length {
		t1, t2 = length/2, length/8*7
	}
	l.renewAt, l.rebindAt, l.Expires = asked.Add(t1), asked.Add(t2), endOf(asked, length)
}

// endOf is zero for a time without an end.
func endOf(asked time.Time, length time.Duration) time.Time {
	return either(length < infiniteLease, asked.Add(length), time.Time{})
}

// leaseRoutes are the classless routes (option 121), or else the routers and the routes by class
// (options 3 and 33): with the first, the others must be ignored (RFC 3442).
func (l *lease) leaseRoutes(ack *dhcpv4.DHCPv4, own netip.Prefix) (out []route) {
	first, last := config.Ends(own)
	add := func(network netip.Prefix, gateway netip.Addr) {
		switch {
		case !gateway.IsValid() || gateway.IsUnspecified():
			gateway = netip.Addr{} // on the link itself
		case gateway == own.Addr() || gateway == first || gateway == last || !gateway.IsGlobalUnicast() && !gateway.IsLinkLocalUnicast():
			l.leftOut("the route to %s with the gateway %s", network, gateway)
			return
		}
		out = append(out, route{network: network.Masked(), gateway: gateway})
	}
	if classless := ack.ClasslessStaticRoute(); len(classless) > 0 {
		for _, r := range classless {
			ones, _ := r.Dest.Mask.Size()
			add(netip.PrefixFrom(address4(r.Dest.IP), ones), address4(r.Router))
		}
		return out
	}
	for _, router := range ack.Router() {
		if !router.IsUnspecified() {
			add(netip.PrefixFrom(netip.IPv4Unspecified(), 0), address4(router))
		}
		if len(out) > 0 {
			break // the first that can be
		}
	}
	for pairs := ack.Options.Get(dhcpv4.OptionStaticRoutingTable); len(pairs) >= 8; pairs = pairs[8:] {
		to := net.IP(pairs[:4])
		if ones, bits := to.DefaultMask().Size(); bits > 0 && !to.IsUnspecified() {
			add(netip.PrefixFrom(address4(to), ones), address4(net.IP(pairs[4:8])))
		}
	}
	return out
}

// address4 is 0.0.0.0 for anything that isn't an IPv4 address.
func address4(ip net.IP) netip.Addr {
	a, ok := netip.AddrFromSlice(ip.To4())
	return either(ok, a, netip.IPv4Unspecified())
}

// dhcp6 is the protocol for IPv6 (RFC 8415) on one link. The client's identifier is made from the
// MAC address, so that it is the same at each boot.
type dhcp6 struct {
	link string
	// informs asks for what else a node needs, and for no address (RFC 8415 §18.2.6).
	informs bool
}

// requested6 are the options that take reads.
var requested6 = []dhcpv6.OptionCode{dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList, dhcpv6.OptionNTPServer}

// How long information is good: by default, and at least (RFC 8415 §7.6).
const refreshDefault, refreshMin = 24 * time.Hour, 10 * time.Minute

// grant6 is what extends a lease.
type grant6 struct {
	client, server dhcpv6.DUID
	ia             *dhcpv6.OptIANA
}

// ask sends a message of a type with these options besides those of all messages, and makes a lease of the answer.
func (d dhcp6) ask(ctx context.Context, kind, answer dhcpv6.MessageType, options ...dhcpv6.Option) (*lease, error) {
	ifi, err := net.InterfaceByName(d.link)
	if err != nil {
		return nil, err
	}
	ip, err := dhcpv6.GetLinkLocalAddr(d.link)
	if err != nil {
		return nil, err
	}
	m, err := dhcpv6.NewSolicit(ifi.HardwareAddr, dhcpv6.WithClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: ifi.HardwareAddr}))
	if err != nil {
		return nil, err
	}
	m.MessageType = kind
	for _, o := range append([]dhcpv6.Option{dhcpv6.OptRequestedOption(requested6...)}, options...) {
		m.UpdateOption(o)
	}
	read := newLease6
	if d.informs {
		m.Options.Del(dhcpv6.OptionIANA)
		m.UpdateOption(dhcpv6.OptRequestedOption(append(requested6, dhcpv6.OptionInformationRefreshTime)...))
		read = newInformation6
	}
	// By its number: Go knows a name for a minute, also of a link that was replaced.
	conn, err := net.ListenUDP("udp6", &net.UDPAddr{IP: ip, Port: dhcpv6.DefaultClientPort, Zone: strconv.Itoa(ifi.Index)})
	if err != nil {
		return nil, err // until duplicate address detection ends, the link has no address to send from
	}
	c, err := nclient6.NewWithConn(conn, ifi.HardwareAddr, nclient6.WithRetry(1), nclient6.WithTimeout(answerWait))
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	defer c.Close()
	asked := time.Now()
	reply, err := c.SendAndRead(ctx, nclient6.AllDHCPRelayAgentsAndServers, m, nclient6.IsMessageType(answer))
	if errors.Is(err, nclient6.ErrNoResponse) || errors.Is(err, context.DeadlineExceeded) {
		return nil, errNoAnswer
	} else if err != nil {
		return nil, err
	}
	return read(d.link, reply, asked)
}

func (d dhcp6) acquire(ctx context.Context, _ netip.Addr) (*lease, error) {
	if d.informs {
		return d.ask(ctx, dhcpv6.MessageTypeInformationRequest, dhcpv6.MessageTypeReply)
	}
	offer, err := d.ask(ctx, dhcpv6.MessageTypeSolicit, dhcpv6.MessageTypeAdvertise)
	if err != nil {
		return nil, err
	}
	g := offer.grant.(grant6)
	return d.ask(ctx, dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeReply, dhcpv6.OptServerID(g.server), g.ia)
}

// extend asks the server of the lease, or with rebind any. For information it asks again: no server keeps anything.
func (d dhcp6) extend(ctx context.Context, l *lease, rebind bool) (*lease, error) {
	g, extends := l.grant.(grant6)
	switch options := []dhcpv6.Option{dhcpv6.OptClientID(g.client), g.ia}; {
	case !extends:
		return d.acquire(ctx, netip.Addr{})
	case rebind:
		return d.ask(ctx, dhcpv6.MessageTypeRebind, dhcpv6.MessageTypeReply, options...)
	default:
		return d.ask(ctx, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeReply, append(options, dhcpv6.OptServerID(g.server))...)
	}
}

func newInformation6(link string, m *dhcpv6.Message, asked time.Time) (*lease, error) {
	id := m.Options.ServerID()
	if id == nil {
		return nil, fmt.Errorf("%w: its answer has no identifier", errRefused)
	}
	l := &lease{LeaseStatus: LeaseStatus{Link: link, Server: id.String()}}
	// Without further answers, it is good for as long again.
	again := max(m.Options.InformationRefreshTime(refreshDefault), refreshMin)
	l.setTimes(asked, min(2*again, infiniteLease), again, again*3/2)
	l.take(m.Options)
	return l, nil
}

// newLease6 reads an answer. An answer without an address is a refusal: of this lease, or of any.
func newLease6(link string, m *dhcpv6.Message, asked time.Time) (*lease, error) {
	o := m.Options
	ia := o.OneIANA()
	if ia == nil || o.ServerID() == nil || o.ClientID() == nil {
		return nil, fmt.Errorf("%w: its answer has no address or no identifier", errRefused)
	}
	for _, s := range []*dhcpv6.OptStatusCode{o.Status(), ia.Options.Status()} {
		if s != nil && s.StatusCode != iana.StatusSuccess {
			return nil, fmt.Errorf("%w: %s %q", errRefused, s.StatusCode, s.StatusMessage)
		}
	}
	l := &lease{LeaseStatus: LeaseStatus{Link: link, Server: o.ServerID().String()}, grant: grant6{o.ClientID(), o.ServerID(), ia}}
	shortest := infiniteLease
	for _, a := range ia.Options.Addresses() {
		addr, _ := netip.AddrFromSlice(a.IPv6Addr)
		switch {
		case a.ValidLifetime <= 0 || len(l.addresses) == maxAdvertised:
			continue // the server has taken it away, or gives more than a node can want
		case !addr.Is6() || addr.Is4In6() || !addr.IsGlobalUnicast():
			l.leftOut("the address %s", a.IPv6Addr)
			continue
		}
		length := max(a.ValidLifetime, minLease)
		shortest = min(shortest, length)
		l.addresses = append(l.addresses, leasedAddress{netip.PrefixFrom(addr, 128), endOf(asked, length)})
	}
	if len(l.addresses) == 0 {
		return nil, fmt.Errorf("%w: its answer has no address", errRefused)
	}
	l.setTimes(asked, shortest, ia.T1, ia.T2)
	l.take(o)
	return l, nil
}

// take takes what a node needs besides an address.
func (l *lease) take(o dhcpv6.MessageOptions) {
	l.Resolvers, l.ntp = l.servers("name server", o.DNS()), l.servers("time server", o.NTPServers())
	if list := o.DomainSearchList(); list != nil {
		l.setSearch(list.Labels)
	}
}

package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/dhcpv6/nclient6"
	"github.com/insomniacslk/dhcp/iana"
)

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
		length, own := max(a.ValidLifetime, minLease), leasedAddress{Prefix: netip.PrefixFrom(addr, 128)}
		if length < infiniteLease {
			own.until = asked.Add(length)
		}
		shortest = min(shortest, length)
		l.addresses = append(l.addresses, own)
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

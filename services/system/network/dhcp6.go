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

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/dhcpv6/nclient6"
	"github.com/insomniacslk/dhcp/iana"
)

// dhcp6 is the protocol for IPv6 (RFC 8415) on one link. The client's identifier is made from the
// MAC address, so that it is the same at each boot.
type dhcp6 struct{ link string }

// information6 asks for what else a node needs, and for no address (RFC 8415 §18.2.6).
type information6 struct{ dhcp6 }

// requested6 are the options that take reads.
var requested6 = []dhcpv6.OptionCode{dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList, dhcpv6.OptionNTPServer}

// How long the answer to information6 is good: by default, and at least (RFC 8415 §7.6).
const refreshDefault, refreshMin = 24 * time.Hour, 10 * time.Minute

// grant6 is what extends a lease.
type grant6 struct {
	client, server dhcpv6.DUID
	ia             *dhcpv6.OptIANA
}

// asking sends a message of a type with these options besides those of all messages, and reads the answer.
type asking func(kind, answer dhcpv6.MessageType, read reading, options ...dhcpv6.Option) (*lease, error)

// reading makes a lease of an answer to what was asked at that time.
type reading func(link string, m *dhcpv6.Message, asked time.Time) (*lease, error)

// with calls f with a client on the link.
func (d dhcp6) with(ctx context.Context, f func(ask asking) (*lease, error)) (*lease, error) {
	ifi, err := net.InterfaceByName(d.link)
	if err != nil {
		return nil, err
	}
	ip, err := dhcpv6.GetLinkLocalAddr(d.link)
	if err != nil {
		return nil, err
	}
	// By its number: Go knows a name for a minute, also of a link that was replaced.
	conn, err := net.ListenUDP("udp6", &net.UDPAddr{IP: ip, Port: dhcpv6.DefaultClientPort, Zone: strconv.Itoa(ifi.Index)})
	if err != nil {
		return nil, err // until duplicate address detection ends, the link has no address to send from
	}
	c, err := nclient6.NewWithConn(conn, ifi.HardwareAddr, nclient6.WithRetry(1), nclient6.WithTimeout(answerWait))
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer c.Close()
	own := dhcpv6.OptClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: ifi.HardwareAddr})
	return f(func(kind, answer dhcpv6.MessageType, read reading, options ...dhcpv6.Option) (*lease, error) {
		asked := time.Now()
		m, err := dhcpv6.NewMessage()
		if err != nil {
			return nil, err
		}
		m.MessageType = kind
		if kind == dhcpv6.MessageTypeSolicit {
			m.AddOption(&dhcpv6.OptIANA{IaId: [4]byte(ifi.HardwareAddr[len(ifi.HardwareAddr)-4:])})
		}
		for _, o := range append([]dhcpv6.Option{own, dhcpv6.OptElapsedTime(0), dhcpv6.OptRequestedOption(requested6...)}, options...) {
			m.UpdateOption(o)
		}
		reply, err := c.SendAndRead(ctx, nclient6.AllDHCPRelayAgentsAndServers, m, nclient6.IsMessageType(answer))
		if errors.Is(err, nclient6.ErrNoResponse) || errors.Is(err, context.DeadlineExceeded) {
			return nil, errNoAnswer
		} else if err != nil {
			return nil, err
		}
		return read(d.link, reply, asked)
	})
}

func (d dhcp6) acquire(ctx context.Context, _ netip.Addr) (*lease, error) {
	return d.with(ctx, func(ask asking) (*lease, error) {
		offer, err := ask(dhcpv6.MessageTypeSolicit, dhcpv6.MessageTypeAdvertise, newLease6)
		if err != nil {
			return nil, err
		}
		g := offer.grant.(grant6)
		return ask(dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeReply, newLease6, dhcpv6.OptServerID(g.server), g.ia)
	})
}

// extend asks the server of the lease, or with rebind any.
func (d dhcp6) extend(ctx context.Context, l *lease, rebind bool) (*lease, error) {
	g, kind := l.grant.(grant6), dhcpv6.MessageTypeRebind
	options := []dhcpv6.Option{dhcpv6.OptClientID(g.client), g.ia}
	if !rebind {
		kind, options = dhcpv6.MessageTypeRenew, append(options, dhcpv6.OptServerID(g.server))
	}
	return d.with(ctx, func(ask asking) (*lease, error) { return ask(kind, dhcpv6.MessageTypeReply, newLease6, options...) })
}

func (d information6) acquire(ctx context.Context, _ netip.Addr) (*lease, error) {
	return d.with(ctx, func(ask asking) (*lease, error) {
		return ask(dhcpv6.MessageTypeInformationRequest, dhcpv6.MessageTypeReply, newInformation6,
			dhcpv6.OptRequestedOption(append(requested6, dhcpv6.OptionInformationRefreshTime)...))
	})
}

// extend asks again: no server keeps anything.
func (d information6) extend(ctx context.Context, _ *lease, _ bool) (*lease, error) {
	return d.acquire(ctx, netip.Addr{})
}

func newInformation6(link string, m *dhcpv6.Message, asked time.Time) (*lease, error) {
	id := m.Options.ServerID()
	if id == nil {
		return nil, fmt.Errorf("%w: its answer has no identifier", errRefused)
	}
	l := &lease{link: link, server: id.String()}
	// Without further answers, it is good for as long again.
	if again := max(m.Options.InformationRefreshTime(refreshDefault), refreshMin); again < infiniteLease {
		l.renewAt, l.rebindAt, l.expireAt = asked.Add(again), asked.Add(again*3/2), asked.Add(2*again)
	}
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
	l := &lease{link: link, server: o.ServerID().String(), grant: grant6{o.ClientID(), o.ServerID(), ia}}
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
	if shortest < infiniteLease {
		// Without times of the server, those of RFC 8415 §21.4.
		t1, t2 := cmp.Or(ia.T1, shortest/2), cmp.Or(ia.T2, shortest*4/5)
		if t1 < minLease/2 || t1 >= t2 || t2 >= shortest {
			t1, t2 = shortest/2, shortest*4/5
		}
		l.renewAt, l.rebindAt, l.expireAt = asked.Add(t1), asked.Add(t2), asked.Add(shortest)
	}
	l.take(o)
	return l, nil
}

// take takes what a node needs besides an address.
func (l *lease) take(o dhcpv6.MessageOptions) {
	l.resolvers, l.ntp = l.servers("name server", o.DNS()), l.servers("time server", o.NTPServers())
	if list := o.DomainSearchList(); list != nil {
		l.setSearch(list.Labels)
	}
}

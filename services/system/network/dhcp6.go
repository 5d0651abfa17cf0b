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

// with calls f with a client on the link.
func (d dhcp6) with(f func(c *nclient6.Client, own dhcpv6.Modifier) (*lease, error)) (*lease, error) {
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
	return f(c, dhcpv6.WithClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: c.InterfaceAddr()}))
}

func (d dhcp6) acquire(ctx context.Context, _ netip.Addr) (*lease, error) {
	return d.with(func(c *nclient6.Client, own dhcpv6.Modifier) (*lease, error) {
		asked := time.Now()
		wanted := dhcpv6.WithRequestedOptions(requested6...)
		solicit, err := dhcpv6.NewSolicit(c.InterfaceAddr(), own, wanted)
		if err != nil {
			return nil, err
		}
		advertise, err := send6(ctx, c, solicit, dhcpv6.MessageTypeAdvertise)
		if err != nil {
			return nil, err
		}
		if _, err := newLease6(advertise, asked); err != nil {
			return nil, err
		}
		request, err := dhcpv6.NewRequestFromAdvertise(advertise, wanted)
		if err != nil {
			return nil, err
		}
		reply, err := send6(ctx, c, request, dhcpv6.MessageTypeReply)
		if err != nil {
			return nil, err
		}
		return newLease6(reply, asked)
	})
}

// extend asks the server of the lease, or with rebind any.
func (d dhcp6) extend(ctx context.Context, l *lease, rebind bool) (*lease, error) {
	last := l.grant.(grant6)
	return d.with(func(c *nclient6.Client, _ dhcpv6.Modifier) (*lease, error) {
		asked := time.Now()
		ia := *last.ia
		m, err := dhcpv6.NewMessage(dhcpv6.WithClientID(last.client), dhcpv6.WithOption(&ia))
		if err != nil {
			return nil, err
		}
		m.MessageType = dhcpv6.MessageTypeRebind
		if !rebind {
			m.MessageType = dhcpv6.MessageTypeRenew
			m.AddOption(dhcpv6.OptServerID(last.server))
		}
		m.AddOption(dhcpv6.OptElapsedTime(0))
		m.AddOption(dhcpv6.OptRequestedOption(requested6...))
		reply, err := send6(ctx, c, m, dhcpv6.MessageTypeReply)
		if err != nil {
			return nil, err
		}
		return newLease6(reply, asked)
	})
}

func (d information6) acquire(ctx context.Context, _ netip.Addr) (*lease, error) {
	return d.with(func(c *nclient6.Client, own dhcpv6.Modifier) (*lease, error) {
		asked := time.Now()
		m, err := dhcpv6.NewMessage(own, dhcpv6.WithRequestedOptions(append(requested6, dhcpv6.OptionInformationRefreshTime)...))
		if err != nil {
			return nil, err
		}
		m.MessageType = dhcpv6.MessageTypeInformationRequest
		m.AddOption(dhcpv6.OptElapsedTime(0))
		reply, err := send6(ctx, c, m, dhcpv6.MessageTypeReply)
		if err != nil {
			return nil, err
		}
		return newInformation6(reply, asked)
	})
}

// extend asks again: no server keeps anything.
func (d information6) extend(ctx context.Context, _ *lease, _ bool) (*lease, error) {
	return d.acquire(ctx, netip.Addr{})
}

func newInformation6(m *dhcpv6.Message, asked time.Time) (*lease, error) {
	id := m.Options.ServerID()
	if id == nil {
		return nil, fmt.Errorf("%w: its answer has no identifier", errRefused)
	}
	l := &lease{server: id.String()}
	// Without further answers, it is good for as long again.
	if again := max(m.Options.InformationRefreshTime(refreshDefault), refreshMin); again < infiniteLease {
		l.renewAt, l.rebindAt, l.expireAt = asked.Add(again), asked.Add(again*3/2), asked.Add(2*again)
	}
	l.take(m.Options)
	return l, nil
}

func send6(ctx context.Context, c *nclient6.Client, m *dhcpv6.Message, answer dhcpv6.MessageType) (*dhcpv6.Message, error) {
	reply, err := c.SendAndRead(ctx, nclient6.AllDHCPRelayAgentsAndServers, m, nclient6.IsMessageType(answer))
	if errors.Is(err, nclient6.ErrNoResponse) || errors.Is(err, context.DeadlineExceeded) {
		return nil, errNoAnswer
	}
	return reply, err
}

// newLease6 reads an answer. An answer without an address is a refusal: of this lease, or of any.
func newLease6(m *dhcpv6.Message, asked time.Time) (*lease, error) {
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
	l := &lease{server: o.ServerID().String(), grant: grant6{o.ClientID(), o.ServerID(), ia}}
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

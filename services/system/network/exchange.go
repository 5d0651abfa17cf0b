package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/sys/unix"
)

// errNoAnswer is silence.
var errNoAnswer = errors.New("no answer")

// wire is the exchange over a real link.
//
// Before there is an address, messages go through a packet socket; to extend a
// lease they come from the address itself, through the kernel's own UDP. The
// node sends no client identifier: servers then know it by its MAC address, and
// reservations by MAC work.
type wire struct {
	link     string
	hostname func() string // sent along where the configuration has one
}

// requested are the options that newLease reads.
var requested = []dhcpv4.OptionCode{
	dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter, dhcpv4.OptionDomainNameServer, dhcpv4.OptionHostName,
	dhcpv4.OptionInterfaceMTU, dhcpv4.OptionNTPServers, dhcpv4.OptionClasslessStaticRoute,
	dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue,
}

func (w wire) modifiers(more ...dhcpv4.Modifier) []dhcpv4.Modifier {
	m := []dhcpv4.Modifier{
		dhcpv4.WithRequestedOptions(requested...),
		dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize)),
	}
	if name := w.hostname(); name != "" {
		m = append(m, dhcpv4.WithOption(dhcpv4.OptHostName(name)))
	}
	return append(m, more...)
}

func (w wire) discover(ctx context.Context, prefer netip.Addr) (*dhcpv4.DHCPv4, error) {
	var more []dhcpv4.Modifier
	if prefer.IsValid() {
		more = append(more, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(prefer.AsSlice())))
	}
	return w.raw(ctx, nclient4.IsMessageType(dhcpv4.MessageTypeOffer), func(mac net.HardwareAddr) (*dhcpv4.DHCPv4, error) {
		return dhcpv4.NewDiscovery(mac, w.modifiers(more...)...)
	})
}

func (w wire) request(ctx context.Context, offer *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, error) {
	return w.raw(ctx, answers(offer), func(net.HardwareAddr) (*dhcpv4.DHCPv4, error) {
		return dhcpv4.NewRequestFromOffer(offer, w.modifiers()...)
	})
}

// raw sends over a packet socket: it works while the link has no address.
func (w wire) raw(ctx context.Context, match nclient4.Matcher, make func(net.HardwareAddr) (*dhcpv4.DHCPv4, error)) (*dhcpv4.DHCPv4, error) {
	c, err := nclient4.New(w.link, nclient4.WithRetry(1), nclient4.WithTimeout(answerWait))
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

func (w wire) extend(ctx context.Context, l *lease, broadcast bool) (*dhcpv4.DHCPv4, error) {
	iface, err := net.InterfaceByName(w.link)
	if err != nil {
		return nil, err
	}
	conn, err := w.listen(ctx, l.address.Addr())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", l.address.Addr(), err)
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
	// Sets ciaddr, and leaves the server identifier out, as RFC 2131 §4.3.2 wants.
	msg, err := dhcpv4.NewRenewFromAck(l.ack, w.modifiers(dhcpv4.WithTransactionID(xid))...)
	if err != nil {
		return nil, err
	}
	dest := nclient4.DefaultServers
	if !broadcast {
		dest = &net.UDPAddr{IP: l.server.AsSlice(), Port: nclient4.ServerPort}
	}
	return send(ctx, c, dest, msg, nclient4.IsMessageType(dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak))
}

// listen opens the client's port on addr, on this link only.
func (w wire) listen(ctx context.Context, addr netip.Addr) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var opt error
		err := raw.Control(func(fd uintptr) {
			opt = errors.Join(
				unix.BindToDevice(int(fd), w.link),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
			)
		})
		return errors.Join(err, opt)
	}}
	return lc.ListenPacket(ctx, "udp4", netip.AddrPortFrom(addr, nclient4.ClientPort).String())
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
			return nil, fmt.Errorf("%w: %s", errNak, text)
		}
		return nil, errNak
	}
	return answer, nil
}

// answers matches what the offering server says to a request. A server that
// calls itself 0.0.0.0, or nothing at all, is taken at its word.
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

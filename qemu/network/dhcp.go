package network

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
)

// leaseTime is shorter than in real networks, so that renewals happen in development.
const leaseTime = time.Hour

// leases answers the DHCP requests of a cluster's nodes: each gets its own address, by its
// hardware address (RFC 2131). The addresses are in the plan, so no lease is recorded.
// Requests of other hardware addresses are not answered.
type leases struct {
	prefix netip.Prefix
	boot   bool // there are files for a boot over the network
	log    *slog.Logger
	nodes  map[string]Node // by hardware address
}

func newLeases(c Config, log *slog.Logger) leases {
	l := leases{prefix: c.Prefix, boot: c.Boot != "", log: log, nodes: map[string]Node{}}
	for _, n := range c.Nodes {
		l.nodes[HardwareAddress(c.Cluster, n.Name).String()] = n
	}
	return l
}

// ServeDHCP answers on the bridge until the returned server is closed.
func (l *LAN) ServeDHCP() (io.Closer, error) {
	var s *server4.Server
	handler := newLeases(l.config, l.log)
	err := l.thread.Do(func() (err error) {
		s, err = server4.NewServer(bridgeName, &net.UDPAddr{IP: net.IPv4zero, Port: dhcpv4.ServerPort}, handler.handle)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dhcpd: %w", err)
	}
	go func() { _ = s.Serve() }() // ends, with an error, when it is closed
	return s, nil
}

func (l leases) handle(conn net.PacketConn, peer net.Addr, question *dhcpv4.DHCPv4) {
	answer, err := l.answer(question)
	if err == nil && answer != nil {
		_, err = conn.WriteTo(answer.ToBytes(), peer)
	}
	if err != nil {
		l.log.Warn("DHCP", "from", question.ClientHWAddr, "error", err)
	}
}

// answer is nil where no answer must be sent.
func (l leases) answer(question *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, error) {
	n, known := l.nodes[question.ClientHWAddr.String()]
	server := Gateway(l.prefix)
	other := question.ServerIdentifier()
	if !known || question.OpCode != dhcpv4.OpcodeBootRequest || other != nil && !other.Equal(server.AsSlice()) {
		return nil, nil
	}
	kind := dhcpv4.MessageTypeOffer
	switch question.MessageType() {
	case dhcpv4.MessageTypeDiscover:
	case dhcpv4.MessageTypeRequest:
		kind = dhcpv4.MessageTypeAck
		wanted := question.RequestedIPAddress()
		if wanted == nil {
			wanted = question.ClientIPAddr // a renewal
		}
		if !wanted.Equal(n.Address.AsSlice()) {
			return dhcpv4.NewReplyFromRequest(question, dhcpv4.WithMessageType(dhcpv4.MessageTypeNak),
				dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server.AsSlice())))
		}
	default:
		return nil, nil // a released address stays reserved for its node
	}
	return dhcpv4.NewReplyFromRequest(question, append(l.bootFile(question),
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithYourIP(n.Address.AsSlice()),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server.AsSlice())),
		dhcpv4.WithNetmask(ipNet(l.prefix).Mask),
		// It is connected to nothing, but Kubernetes gets its address from the default route.
		dhcpv4.WithOption(dhcpv4.OptRouter(server.AsSlice())),
		dhcpv4.WithOption(dhcpv4.OptHostName(n.Name)),
		dhcpv4.WithLeaseTime(uint32(leaseTime/time.Second)))...)
}

// httpClass is the class of a UEFI that boots over HTTP (UEFI 2.10, 24.7.2.2). QEMU's network cards for a BIOS have
// iPXE, whose user class is ipxeClass.
const (
	httpClass = "HTTPClient"
	ipxeClass = "iPXE"
)

// bootFile names the URL of what a machine boots over the network.
func (l leases) bootFile(question *dhcpv4.DHCPv4) (with []dhcpv4.Modifier) {
	file := ""
	switch {
	case !l.boot:
	case slices.Contains(question.UserClass(), ipxeClass):
		file = media.ScriptFile
	case strings.HasPrefix(question.ClassIdentifier(), httpClass):
		file, with = media.UKIFile, append(with, dhcpv4.WithOption(dhcpv4.OptClassIdentifier(httpClass)))
	}
	if file != "" {
		url := fmt.Sprintf("http://%s/%s", netip.AddrPortFrom(Gateway(l.prefix), bootPort), file)
		with = append(with, dhcpv4.WithOption(dhcpv4.OptBootFileName(url)))
	}
	return with
}

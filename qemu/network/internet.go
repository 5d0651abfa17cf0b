package network

import (
	"errors"
	"net/netip"
	"os"
	"sync"

	"github.com/containers/gvisor-tap-vsock/pkg/services/forwarder"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// NameServer is the address at which nodes with a way out find the name server of this machine. It is one for
// documentation (RFC 5737), which nobody has.
var NameServer = netip.MustParseAddr("203.0.113.53")

// openInternet makes the way out of a network for nodes and pods: connections and datagrams of IPv4 end in this
// process, which makes them anew.
//
//	node ── default route ── bridge ── tun in the thread's namespace ── stack of this process ── its sockets, as of any program here
//
// So this machine gets no address, route or rule, and nothing is left when the process ends, in whatever way.
func (l *LAN) openInternet() error {
	const mtu = 1500 // Ethernet's
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "internet", MTU: mtu}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, NonPersist: true, Queues: 1}
	err := l.thread.Do(func() error {
		return errors.Join(netlink.LinkAdd(tun), os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	})
	if err == nil {
		err = errors.Join(l.links.LinkSetUp(tun), l.links.RouteAdd(&netlink.Route{LinkIndex: tun.Index, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}))
	}
	if err != nil {
		return err
	}
	link, err := fdbased.New(&fdbased.Options{FDs: []int{int(tun.Fds[0].Fd())}, MTU: mtu})
	if err != nil {
		return err
	}
	others, lock := map[tcpip.Address]tcpip.Address{}, new(sync.Mutex)
	if own, err := dns.ClientConfigFromFile("/etc/resolv.conf"); err == nil && len(own.Servers) > 0 {
		server, _ := netip.ParseAddr(own.Servers[0])
		others[tcpip.AddrFromSlice(NameServer.AsSlice())] = tcpip.AddrFromSlice(server.AsSlice())
	}
	s := stack.New(stack.Options{NetworkProtocols: []stack.NetworkProtocolFactory{ipv4.NewProtocol}, TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol}})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, forwarder.TCP(s, others, lock, false).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, forwarder.UDP(s, others, lock, false).HandlePacket)
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	l.internet = func() { s.Destroy(); tun.Fds[0].Close() }
	if refused := s.CreateNIC(1, link); refused != nil {
		return errors.New(refused.String())
	}
	s.SetPromiscuousMode(1, true) // all addresses are its own
	s.SetSpoofing(1, true)
	return nil
}

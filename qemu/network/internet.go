package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/garboard-os/garboard/api/balance"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	internetMTU = 1500
	// maxDials bounds the connections that aren't made yet, and udpIdle how long an exchange of datagrams may pause (RFC 4787, 4.3: 2 minutes at least).
	maxDials = 512
	udpIdle  = 2 * time.Minute
	// dialTime is that of a person who waits.
	dialTime = 10 * time.Second
)

// NameServer is the address at which nodes with a way out find the name server of this machine. It is one for documentation (RFC 5737), which
// nobody has.
var NameServer = netip.MustParseAddr("192.0.2.53")

// openInternet makes the way out of a network for nodes and pods: connections and datagrams of IPv4 end in this process, which makes them anew.
//
//	node ── default route ── bridge ── tun in the thread's namespace ── stack of this process ── its sockets, as of any program here
//
// So this machine gets no address, route or rule, and nothing is left when the process ends, in whatever way.
func (l *LAN) openInternet() error {
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "internet", MTU: internetMTU}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, NonPersist: true, Queues: 1}
	if err := l.thread.Do(func() error {
		if err := netlink.LinkAdd(tun); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(tun); err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: tun.Index, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}); err != nil {
			return err
		}
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
	}); err != nil {
		return fmt.Errorf("way out: %w", err)
	}
	link, err := fdbased.New(&fdbased.Options{FDs: []int{int(tun.Fds[0].Fd())}, MTU: internetMTU})
	if err != nil {
		return fmt.Errorf("way out: %w", err)
	}
	s := stack.New(stack.Options{NetworkProtocols: []stack.NetworkProtocolFactory{ipv4.NewProtocol}, TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol}})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxDials, forwardTCP).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, forwardUDP).HandlePacket)
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	if err := s.CreateNIC(1, link); err != nil {
		return fmt.Errorf("way out: %s", err)
	}
	s.SetPromiscuousMode(1, true) // all addresses are its own
	s.SetSpoofing(1, true)
	l.internet = func() {
		s.Destroy()
		tun.Fds[0].Close()
	}
	return nil
}

// target is where a node wants to, or "" where nobody may: what is for this machine only stays closed.
func target(id stack.TransportEndpointID) string {
	to := netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort)
	switch a := to.Addr(); {
	case a == NameServer:
		own, err := dns.ClientConfigFromFile("/etc/resolv.conf")
		if err != nil || len(own.Servers) == 0 {
			return ""
		}
		return net.JoinHostPort(own.Servers[0], "53")
	case a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified():
		return ""
	}
	return to.String()
}

func forwardTCP(r *tcp.ForwarderRequest) {
	out, err := net.DialTimeout("tcp", target(r.ID()), dialTime)
	if err != nil {
		r.Complete(true)
		return
	}
	var events waiter.Queue
	in, refused := r.CreateEndpoint(&events)
	r.Complete(refused != nil)
	if refused != nil {
		out.Close()
		return
	}
	conn := gonet.NewTCPConn(&events, in)
	defer conn.Close()
	balance.Splice(conn, out)
}

func forwardUDP(r *udp.ForwarderRequest) {
	out, err := net.DialTimeout("udp", target(r.ID()), dialTime)
	if err != nil {
		return
	}
	var events waiter.Queue
	in, refused := r.CreateEndpoint(&events)
	if refused != nil {
		out.Close()
		return
	}
	go balance.Splice(pausing{gonet.NewUDPConn(&events, in)}, pausing{out})
}

// pausing is an exchange of datagrams, which ends with a pause.
type pausing struct{ net.Conn }

func (p pausing) Read(b []byte) (int, error) {
	if err := p.SetReadDeadline(time.Now().Add(udpIdle)); err != nil {
		return 0, err
	}
	return p.Conn.Read(b)
}

//go:build kernel

package network

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/vishvananda/netlink"
)

// A lease that ends when it is granted (option 51 is 0).
// At most an attempt in some seconds (other clients use a minimum of 16 or 20 s), and a line that isn't repeated.
func TestLeaseOfNoLength(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.41.0.1/24")
	p.shortServer("far0", "10.41.0.1", "10.41.0.77", 0)
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP: true}}})
	time.Sleep(10 * time.Second)
	if lines := strings.Count(n.console.String(), "\n"); lines > 5 {
		t.Errorf("%d lines on the console in 10 s", lines)
	}
}

func oddServer(p *peer, link, addr, give string, more ...dhcpv4.Modifier) {
	p.do(func() {
		server, err := server4.NewServer(link, nil, func(c net.PacketConn, _ net.Addr, m *dhcpv4.DHCPv4) {
			kind := dhcpv4.MessageTypeOffer
			if m.MessageType() == dhcpv4.MessageTypeRequest {
				kind = dhcpv4.MessageTypeAck
			}
			reply, err := dhcpv4.NewReplyFromRequest(m, append([]dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(net.ParseIP(give)),
				dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithLeaseTime(3600), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(addr)))}, more...)...)
			if err == nil {
				c.WriteTo(reply.ToBytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: 68})
			}
		})
		if err != nil {
			p.t.Error(err)
			return
		}
		go server.Serve()
		p.t.Cleanup(func() { server.Close() })
	})
}

// Option 6 of a cheap router begins with addresses that can't be servers; the good one is the fourth.
// They are left out, as the checks refuse them in machine.network.nameservers.
func TestNameServersOfALease(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.70.0.1/24")
	oddServer(p, "far0", "10.70.0.1", "10.70.0.77", dhcpv4.WithDNS(net.IPv4zero, net.IPv4bcast, net.ParseIP("127.0.0.1"), net.ParseIP("10.70.0.1")))
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	if text, _ := os.ReadFile(filepath.Join(n.etc, "resolv.conf")); !strings.Contains(string(text), "nameserver 10.70.0.1\n") {
		t.Errorf("resolv.conf: %q", text)
	}
}

// Option 1 is 0.0.0.0. The address gets the default mask of its class, or /32, and a line is logged.
func TestMaskOfALease(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.70.1.1/24")
	oddServer(p, "far0", "10.70.1.1", "10.70.1.77", dhcpv4.WithNetmask(net.CIDRMask(0, 32)))
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	if got := addresses(t, "eth0"); len(got) == 1 && strings.HasSuffix(got[0], "/0") {
		t.Errorf("addresses: %q", got)
	}
}

// The domain of the network (options 15 and 119).
// Short names of that domain resolve on the node: resolv.conf has a search line.
func TestSearchDomain(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.36.4.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.36.4.50,10.36.4.60,1h", "--domain=corp.example.org", "--dhcp-option=119,corp.example.org,example.org", "--dhcp-option=6,10.36.4.1")
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	if text, _ := os.ReadFile(filepath.Join(n.etc, "resolv.conf")); !strings.Contains(string(text), "search corp.example.org") {
		t.Errorf("resolv.conf: %q", text)
	}
}

// A server chooses by the classes of a node (options 60 and 77), and other classes get another address at once.
func TestClassesOfDHCP(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.99.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=tag:storage,10.99.0.50,10.99.0.50,2m", "--dhcp-range=tag:plain,10.99.0.60,10.99.0.60,2m",
		"--dhcp-userclass=set:user,rack-7", "--dhcp-vendorclass=set:vendor,storage", "--dhcp-vendorclass=set:plain,garboard",
		"--tag-if=set:storage,tag:user,tag:vendor")
	entry := config.Interface{Name: "eth0", DHCP: true, DHCPOptions: config.DHCPOptions{UserClass: "rack-7", VendorClassIdentifier: "storage"}}
	n := startNode(t, config.Network{Interfaces: []config.Interface{entry}})
	n.up(20 * time.Second)
	becomes(t, "eth0", "10.99.0.50/24")
	entry.DHCPOptions = config.DHCPOptions{RouteMetric: 7, RouteTable: 200}
	n.configure(config.Network{Interfaces: []config.Interface{entry}})
	becomes(t, "eth0", "10.99.0.60/24")
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 200}, netlink.RT_FILTER_TABLE)
	if err != nil || len(routes) != 1 || routes[0].Priority != 7 {
		t.Errorf("routes of table 200: %v, %v", routes, err)
	}
	if left := fmt.Sprint(gateways(t, netlink.FAMILY_V4)); strings.Contains(left, "via 10.") {
		t.Errorf("routes of the main table: %s", left)
	}
}

package network

import (
	"fmt"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
)

// S-119: the address that control planes share is another service's. It stays while
// this one changes the node's own, whether those are static or DHCP's, and is never the
// one that the node is known by.
func TestS119TheSharedAddressStays(t *testing.T) {
	needRoot(t)
	p := newPeer(t)
	p.wire("eth0", "far0", "10.19.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.19.0.50,10.19.0.60,2m")
	vip := &config.VIP{IP: addr("10.19.0.254")}
	l, err := netlink.LinkByName("eth0")
	if err == nil {
		err = netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(prefix("10.19.0.254/32"))}) // before the node's own
	}
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.19.0.2/24"), VIP: vip}}})
	n.up(5 * time.Second)
	becomes(t, "eth0", "10.19.0.254/32", "10.19.0.2/24")
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.19.0.3/24"), VIP: vip}}})
	becomes(t, "eth0", "10.19.0.254/32", "10.19.0.3/24")
	eventually.That(t, 5*time.Second, "the node is known by its new address", func() error {
		if got := n.address(); got.Primary != addr("10.19.0.3") || len(got.All) != 1 {
			return fmt.Errorf("its addresses are %+v", got)
		}
		return nil
	})
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP: true, VIP: vip}}})
	eventually.That(t, 10*time.Second, "the node is known by the address that DHCP gave", func() error {
		got := n.address()
		if !prefix("10.19.0.48/28").Contains(got.Primary) || len(got.All) != 1 {
			return fmt.Errorf("its addresses are %+v", got)
		}
		return nil
	})
	becomes(t, "eth0", "10.19.0.254/32", n.address().All[0].String())
}

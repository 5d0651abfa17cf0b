//go:build kernel

package network

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// S-119: the shared address of control planes belongs to another service. It
// stays while networkd changes the node's own addresses, static or DHCP's, and
// never becomes the node's address.
func TestS119TheSharedAddressStays(t *testing.T) {
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

// The same with IPv6.
func TestS119TheSharedIPv6AddressStays(t *testing.T) {
	newPeer(t).wire("eth0", "far0", "10.19.1.1/24")
	shared := addr("2001:db8::fe")
	vip := &config.VIP{IP: shared}
	l, err := netlink.LinkByName("eth0")
	if err == nil {
		err = netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(prefix("2001:db8::fe/128")), Flags: unix.IFA_F_NODAD, ValidLft: 0xffffffff})
	}
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("2001:db8::2/64"), VIP: vip}}})
	n.up(5 * time.Second)
	for _, own := range []string{"2001:db8::3/64", "2001:db8::4/64"} {
		n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix(own), VIP: vip}}})
		eventually.That(t, 5*time.Second, "the node is known by its new address", func() error {
			if got := n.address(); got.Primary != prefix(own).Addr() || len(got.All) != 1 {
				return fmt.Errorf("its addresses are %+v", got)
			}
			return nil
		})
		there, err := netlink.AddrList(l, netlink.FAMILY_V6)
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, a := range there {
			if a.Scope == unix.RT_SCOPE_UNIVERSE {
				all = append(all, a.IPNet.String())
			}
		}
		slices.Sort(all)
		if want := []string{own, "2001:db8::fe/128"}; !slices.Equal(all, want) {
			t.Errorf("the link has %q, want %q", all, want)
		}
	}
}

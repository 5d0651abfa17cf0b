//go:build kernel

package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// A network with DHCPv4 and IPv6 by router advertisements; forwarding is on, as init sets it (init/settings.go).
// The link gets an address and the default route of the advertisement (accept_ra=2 on the node's own links).
func TestRouterAdvertisements(t *testing.T) {
	os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1\n"), 0)
	p := newPeer(t)
	p.wire("eth0", "far0", "10.46.0.1/24")
	p.do(func() { p.address("far0", "fd46::1/64") })
	p.dnsmasq("--interface=far0", "--dhcp-range=10.46.0.50,10.46.0.60,1h", "--dhcp-range=fd46::,ra-only,64,1h", "--enable-ra", "--ra-param=far0,4,600")
	n := startNode(t, config.Network{})
	n.up(20 * time.Second)
	eventually.That(t, 20*time.Second, "an address of fd46::/64", func() error {
		l, _ := netlink.LinkByName("eth0")
		all, _ := netlink.AddrList(l, netlink.FAMILY_V6)
		for _, a := range all {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && prefix("fd46::/64").Contains(ip) {
				return nil
			}
		}
		return fmt.Errorf("%v", all)
	})
	// A static route has priority over that of the router, and is set beside it.
	dhcp := config.Interface{Name: "eth0", DHCP: true, Routes: []config.Route{{Network: prefix("::/0"), Gateway: addr("fd46::9")}}}
	n.configure(config.Network{Interfaces: []config.Interface{dhcp}})
	eventually.That(t, 20*time.Second, "both default routes", func() error {
		all := ip(t, "-6", "route")
		if strings.Contains(all, "default via fd46::9 dev eth0 proto 103 metric 1024") && strings.Contains(all, "proto ra metric 1025") {
			return nil
		}
		return errors.New(all)
	})
	n.follows()
	// What was advertised goes with the setting.
	dhcp.AcceptRA, dhcp.Routes = config.AdvertisementsOff, nil
	n.configure(config.Network{Interfaces: []config.Interface{dhcp}})
	eventually.That(t, 20*time.Second, "nothing of the router is left", func() error {
		if all := ip(t, "-6", "-o", "addr", "show", "dev", "eth0", "scope", "global") + ip(t, "-6", "route", "show", "proto", "ra"); strings.TrimSpace(all) != "" {
			return errors.New(all)
		}
		return nil
	})
}

// The same network without DHCPv4. The node is up with the address of the advertisement.
func TestOnlyRouterAdvertisements(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.47.0.1/24")
	p.do(func() { p.address("far0", "fd47::1/64") })
	p.dnsmasq("--interface=far0", "--dhcp-range=fd47::,ra-only,64,1h", "--enable-ra", "--ra-param=far0,4,600")
	n := startNode(t, config.Network{})
	n.up(2 * time.Minute)
	eventually.That(t, 10*time.Second, "the route of the advertisement is an object", func() error {
		all := Routes.List(n.store)
		if slices.ContainsFunc(all, func(o resource.Object[Object]) bool {
			return o.Spec.By == byKernel && strings.HasPrefix(o.Spec.What, "::/0 via fe80:")
		}) {
			return nil
		}
		return fmt.Errorf("%v", all)
	})
}

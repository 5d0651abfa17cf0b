//go:build kernel

package network

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// Two cards by DHCP; the cable of the second one is out (or its switch, or its server is off) when the machine starts.
// After a bounded time the node goes on with the address that it has: networkd is up, name, hosts and resolv.conf
// are written, kubelet and etcd start; the silent link is a problem in the status and in doctor.
func TestOneSilentLink(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.55.0.1/24")
	p.wire("eth1", "far1", "10.55.1.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.55.0.50,10.55.0.60,1h")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP: true}, {Name: "eth1", DHCP: true}}})
	n.up(2 * time.Minute)
	n.follows(`waiting for DHCP answer on "eth1"`)
	for _, name := range []string{"hostname", "hosts", "resolv.conf"} {
		if text, err := os.ReadFile(filepath.Join(n.etc, name)); err != nil || len(text) == 0 && name != "resolv.conf" || name == "hosts" && !strings.Contains(string(text), "\n10.55.0.") {
			t.Errorf("%s is %q (%v)", name, text, err)
		}
	}
}

// The same with a card that is broken, or has another name after a change of firmware.
func TestOneLinkIsGone(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.56.0.1/24")
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.56.0.2/24"), Routes: []config.Route{{Network: prefix("0.0.0.0/0"), Gateway: addr("10.56.0.1")}}},
		{Name: "eth1", CIDR: prefix("10.56.1.2/24")}}})
	n.up(2 * time.Minute)
}

// An entry for a link that doesn't exist (a typing mistake, dummy0, a card that comes later) is applied to a running
// node. The status has a problem at once (gbctl patch shows warnings of the node), and the next boot doesn't end at it.
func TestTimeBomb(t *testing.T) {
	p, dir := newPeer(t), t.TempDir()
	p.wire("eth0", "far0", "10.80.0.1/24")
	good := []config.Interface{{Name: "eth0", CIDR: prefix("10.80.0.2/24")}}
	n := startNodeIn(t, dir, config.Network{Interfaces: good})
	n.up(10 * time.Second)
	bad := config.Network{Interfaces: append(good, config.Interface{Name: "eth9", CIDR: prefix("192.0.2.9/24")})}
	n.configure(bad)
	n.follows(`interface "eth9" to appear`)
	n.stop()
	startNodeIn(t, dir, bad).up(2 * time.Minute)
}

// The DHCP server offers an MTU that the card can't have (option 26 with 9000; here a vxlan whose lower link has 1500).
// The node is up with the address; the MTU that wasn't possible is a warning.
func TestMTUOfTheLease(t *testing.T) {
	p := newPeer(t)
	p.wire("low0", "flow0", "10.50.0.1/24")
	p.address("low0", "10.50.0.2/24")
	linkUp(t, "low0")
	vxlan := func(name, lower, local, remote string) {
		l, err := netlink.LinkByName(lower)
		if err == nil {
			err = netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: name}, VxlanId: 7, VtepDevIndex: l.Attrs().Index, SrcAddr: net.ParseIP(local), Group: net.ParseIP(remote), Port: 4789})
		}
		if err != nil {
			t.Error(err)
		}
	}
	vxlan("eth0", "low0", "10.50.0.2", "10.50.0.1")
	t.Cleanup(func() { l, _ := netlink.LinkByName("eth0"); netlink.LinkDel(l) })
	p.do(func() {
		vxlan("far0", "flow0", "10.50.0.1", "10.50.0.2")
		p.address("far0", "10.51.0.1/24")
		linkUp(t, "far0")
	})
	p.dnsmasq("--interface=far0", "--dhcp-range=10.51.0.50,10.51.0.60,1h", "--dhcp-option=26,9000")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "low0", Ignore: true}, {Name: "eth0", DHCP: true}}})
	n.up(20 * time.Second)
	n.follows("MTU")
	if got := addresses(t, "eth0"); len(got) != 1 || !strings.HasPrefix(got[0], "10.51.0.5") && got[0] != "10.51.0.60/24" {
		t.Errorf("eth0 has %v", got)
	}
}

// One of several routes, from DHCP (option 121) or from the configuration, has a gateway that the kernel refuses.
// Up, with the good routes; the bad one is a problem in the status.
func TestOneBadRoute(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.58.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.58.0.50,10.58.0.60,1h", "--dhcp-option-force=121,0.0.0.0/0,10.58.0.1,172.16.0.0/12,10.58.0.255")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP: true}}})
	n.up(20 * time.Second)
	n.follows("the route to 172.16.0.0/12 with the gateway 10.58.0.255 can't be used")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.58.0.1 metric 1024")
}

// A program in a pod with the host's network (a CNI that is being replaced) removes the node's address; its default
// route goes with it. It is there again within some tens of seconds, with a line in the log, as a changed sysctl and a
// changed file are.
func TestAddressTakenAway(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.49.0.1/24")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.49.0.2/24"),
		Routes: []config.Route{{Network: prefix("0.0.0.0/0"), Gateway: addr("10.49.0.1")}}}}})
	n.up(10 * time.Second)
	taken := func() {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			err = netlink.AddrDel(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 49, 0, 2), Mask: net.CIDRMask(24, 32)}})
		}
		if err != nil {
			t.Fatal(err)
		}
		becomes(t, "eth0", "10.49.0.2/24")
		eventually.That(t, 30*time.Second, "the route is there again", func() error {
			if got := routes(t, "eth0"); !slices.Equal(got, []string{"0.0.0.0/0 via 10.49.0.1 metric 1024"}) {
				return fmt.Errorf("routes %v", got)
			}
			return nil
		})
	}
	taken() // perhaps while the link's coming up is still news, with which the kernel drops addresses, too
	taken()
	if text := n.console.String(); !strings.Contains(text, "10.49.0.2/24 of eth0 was removed by another program") {
		t.Errorf("console:\n%s", text)
	}
}

//go:build kernel

package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ip is the output of ip(8) on the node.
func ip(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		t.Errorf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func shows(t *testing.T, want string, args ...string) {
	t.Helper()
	eventually.That(t, 10*time.Second, want, func() error {
		if out := ip(t, args...); !strings.Contains(out, want) {
			return fmt.Errorf("ip %s: %s", strings.Join(args, " "), out)
		}
		return nil
	})
}

// Routes with a table, a source and an MTU, routes without a way, and rules: each is there, comes back when another
// program removes it, and goes with the configuration. Those of another program stay.
func TestRoutesAndRules(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.90.0.1/24")
	first := config.Network{
		Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.90.0.2/24"), Routes: []config.Route{
			{Network: prefix("0.0.0.0/0"), Gateway: addr("10.90.0.1")},
			{Network: prefix("172.21.0.0/16"), Gateway: addr("10.90.0.1"), Source: addr("10.90.0.2"), MTU: 1300, Table: 100},
			{Network: prefix("172.22.0.0/16"), Type: config.RouteBlackhole},
			{Network: prefix("2001:db8:7::/48"), Type: config.RouteUnreachable},
		}}},
		Rules: []config.Rule{{Priority: 1000, From: prefix("10.90.0.2/32"), Table: 100}, {Priority: 1001, To: prefix("2001:db8::/32"), Table: 100}},
	}
	n := startNode(t, first)
	n.up(10 * time.Second)
	n.follows()
	ip(t, "route", "add", "172.29.0.0/16", "via", "10.90.0.1")
	there := func() {
		t.Helper()
		shows(t, "172.21.0.0/16 via 10.90.0.1 dev eth0 proto 103 src 10.90.0.2 metric 1024 mtu 1300", "route", "show", "table", "100")
		shows(t, "blackhole 172.22.0.0/16 proto 103", "route")
		shows(t, "unreachable 2001:db8:7::/48 dev lo proto 103", "-6", "route", "show", "type", "unreachable")
		shows(t, "1000:\tfrom 10.90.0.2 lookup 100 proto 103", "rule")
		shows(t, "1001:\tfrom all to 2001:db8::/32 lookup 100 proto 103", "-6", "rule")
		shows(t, "172.29.0.0/16 via 10.90.0.1", "route")
	}
	there()
	ip(t, "route", "flush", "table", "100")
	ip(t, "route", "del", "blackhole", "172.22.0.0/16")
	ip(t, "rule", "del", "priority", "1000")
	there()
	if line := "the route 172.22.0.0/16 metric 1024 was removed by another program"; !strings.Contains(n.console.String(), line) {
		t.Errorf("the console doesn't say %q: %s", line, n.console)
	}
	for id, by := range map[string]string{"eth0-172.21.0.0/16 via 10.90.0.1 metric 1024 table 100": "interfaces[0].routes[1]", "172.22.0.0/16 metric 1024": "interfaces[0].routes[2]"} {
		if o, err := Routes.Get(n.store, id); err != nil || o.Spec.Problem != "" || o.Spec.By != "machine.network."+by || o.Created.IsZero() {
			t.Errorf("the route %s: %+v (%v)", id, o, err)
		}
	}
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.90.0.2/24")}}})
	n.follows()
	eventually.That(t, 5*time.Second, "nothing of ours is left", func() error {
		state, err := readKernel()
		for o := range state.objects {
			switch o.(type) {
			case route, rule:
				return fmt.Errorf("%s", o.on("eth0"))
			}
		}
		return err
	})
	shows(t, "172.29.0.0/16 via 10.90.0.1", "route")
	ip(t, "route", "del", "172.29.0.0/16")
}

// A rule without addresses is for both families. One that another program removes comes back at once.
func TestRuleOfAMark(t *testing.T) {
	newPeer(t).wire("eth0", "far0", "10.89.0.1/24")
	n := startNode(t, config.Network{
		Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.89.0.2/24")}},
		Rules: []config.Rule{
			{Priority: 1002, FwMark: 0x20, Table: 100}, {Priority: 1003, From: prefix("0.0.0.0/0"), Table: 101}, {Priority: 1004, To: prefix("::/0"), Table: 101},
		},
	})
	n.up(10 * time.Second)
	n.follows()
	for range 2 {
		shows(t, "1002:\tfrom all fwmark 0x20 lookup 100 proto 103", "rule")
		shows(t, "1002:\tfrom all fwmark 0x20 lookup 100 proto 103", "-6", "rule")
		ip(t, "rule", "del", "priority", "1002")
		ip(t, "-6", "rule", "del", "priority", "1002")
	}
	shows(t, "1002:", "rule")
	shows(t, "1003:\tfrom all lookup 101 proto 103", "rule")
	shows(t, "1004:\tfrom all lookup 101 proto 103", "-6", "rule")
	for _, id := range []string{"1002", "1002-IPv6", "1003", "1004-IPv6"} {
		if o, err := Rules.Get(n.store, id); err != nil || o.Spec.Problem != "" {
			t.Errorf("the rule %s: %+v (%v)", id, o, err)
		}
	}
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.89.0.2/24")}}})
	eventually.That(t, 10*time.Second, "both rules go with the configuration", func() error {
		if out := ip(t, "rule") + ip(t, "-6", "rule"); strings.Contains(out, "1002:") {
			return errors.New(out)
		}
		return nil
	})
}

// A route that another program has already is a problem of ours, and stays.
func TestRouteOfAnotherProgramStays(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.91.0.1/24")
	linkUp(t, "eth0")
	p.address("eth0", "10.91.0.9/24")
	ip(t, "route", "add", "172.23.0.0/16", "via", "10.91.0.1", "metric", "1024")
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.91.0.2/24"), Routes: []config.Route{{Network: prefix("172.23.0.0/16"), Gateway: addr("10.91.0.1")}}},
	}})
	n.up(10 * time.Second)
	n.follows("another program has one like it")
	ip(t, "route", "del", "172.23.0.0/16")
	shows(t, "172.23.0.0/16 via 10.91.0.1 dev eth0 proto 103", "route")
	n.follows()
}

// S-116: an entry, and a member of a bond, select a card by its MAC address, whatever the kernel calls it. The entry's
// name is a second name of the card.
func TestCardsBySelector(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.92.0.1/24")
	p.wire("eth1", "far1", "10.92.1.1/24")
	mac := func(name string) string {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return l.Attrs().HardwareAddr.String()
	}
	cfg := config.Network{Interfaces: []config.Interface{
		{Name: "uplink", HardwareAddr: mac("eth1"), CIDR: prefix("10.92.1.2/24"), VLANs: []config.VLAN{{ID: 100, CIDR: prefix("10.92.100.2/24")}}},
		{HardwareAddr: mac("eth0"), CIDR: prefix("10.92.0.2/24")},
		{HardwareAddr: "02:00:00:00:00:99", CIDR: prefix("10.92.9.2/24")},
	}}
	n := startNode(t, cfg)
	n.up(time.Minute)
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.92.0.2/24")
	same(t, "addresses of eth1", addresses(t, "eth1"), "10.92.1.2/24")
	same(t, "addresses of its VLAN", addresses(t, "uplink.100"), "10.92.100.2/24")
	if l, err := netlink.LinkByName("uplink"); err != nil || l.Attrs().Name != "eth1" {
		t.Errorf("uplink is %v (%v)", l, err)
	}
	if o, err := Links.Get(n.store, "eth1"); err != nil || o.Spec.Alias != "uplink" {
		t.Errorf("eth1 is shown as %+v (%v)", o, err)
	}
	n.follows(`interface "02:00:00:00:00:99" to appear`)
}

// IPv6: an address that another host has is found by duplicate address detection: it is a problem, and isn't the node's
// until that host is gone.
func TestAddressOfAnotherHost(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.93.0.1/24")
	p.do(func() { p.address("far0", "fd93::2/64") })
	becomesUsable := func() error {
		l, err := netlink.LinkByName("far0")
		if err != nil {
			return err
		}
		all, err := netlink.AddrList(l, netlink.FAMILY_V6)
		for _, a := range all {
			if a.Flags&unix.IFA_F_TENTATIVE != 0 {
				return fmt.Errorf("%s is tentative", a.IPNet)
			}
		}
		return err
	}
	linkUp(t, "eth0")
	p.do(func() { eventually.That(t, 10*time.Second, "the other host has its addresses", becomesUsable) })
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("fd93::2/64")}, {Name: "eth0", CIDR: prefix("10.93.0.2/24")}}})
	n.up(10 * time.Second)
	eventually.That(t, 20*time.Second, "the problem is told", func() error {
		o, err := Statuses.Get(n.store, ID)
		if err == nil && !strings.Contains(strings.Join(o.Spec.Problems, ","), "another host of the network has this address") {
			err = fmt.Errorf("problems %q", o.Spec.Problems)
		}
		return err
	})
	if a := n.address(); a.Primary != addr("10.93.0.2") || len(a.All) != 1 {
		t.Errorf("the node's addresses are %+v", a)
	}
	p.do(func() {
		l, err := netlink.LinkByName("far0")
		if err == nil {
			err = netlink.AddrDel(l, &netlink.Addr{IPNet: ipNet(prefix("fd93::2/64"))})
		}
		if err != nil {
			t.Error(err)
		}
	})
	eventually.That(t, 90*time.Second, "the node has the address", func() error {
		if a := n.address(); !slices.Contains(a.All, prefix("fd93::2/64")) {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	n.follows()
}

// An address of a router advertisement that another host has is a problem until the node can have it.
func TestAdvertisedAddressOfAnotherHost(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.88.0.1/24")
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	mac := eth0.Attrs().HardwareAddr
	taken := fmt.Sprintf("fd88::%x:%xff:fe%02x:%x", int(mac[0]^2)<<8|int(mac[1]), mac[2], mac[3], int(mac[4])<<8|int(mac[5]))
	p.do(func() { p.address("far0", "fd88::1/64"); p.address("far0", taken+"/64") })
	linkUp(t, "eth0")
	p.do(func() {
		eventually.That(t, 10*time.Second, "the other host has its addresses", func() error {
			if out := ip(t, "-6", "address", "show", "dev", "far0", "tentative"); strings.Contains(out, "fd88::") {
				return errors.New(out)
			}
			return nil
		})
	})
	p.dnsmasq("--interface=far0", "--dhcp-range=fd88::,ra-only,64,1h", "--enable-ra", "--ra-param=far0,4,600")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.88.0.2/24")}}})
	n.up(20 * time.Second)
	eventually.That(t, 20*time.Second, "the problem is told", func() error {
		o, err := Statuses.Get(n.store, ID)
		if want := "address " + addr(taken).String() + "/64 of eth0: " + errTaken.Error(); err == nil && !slices.Contains(o.Spec.Problems, want) {
			err = fmt.Errorf("problems %q, want %s", o.Spec.Problems, want)
		}
		return err
	})
	p.do(func() { ip(t, "address", "del", taken+"/64", "dev", "far0") })
	eventually.That(t, 60*time.Second, "the node has the address", func() error {
		if a := n.address(); !slices.Contains(a.All, prefix(taken+"/64")) {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	n.follows()
}

// Name servers and search domains of router advertisements, and an address by DHCPv6 where the router says so; and
// nothing of it where the configuration refuses advertisements.
func TestNetworkOfIPv6Only(t *testing.T) {
	p := newPeer(t)
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1\n"), 0); err != nil {
		t.Fatal(err)
	}
	p.wire("eth0", "far0", "10.94.0.1/24")
	p.wire("eth1", "far1", "10.94.1.1/24")
	p.do(func() { p.address("far0", "fd94::1/64"); p.address("far1", "fd95::1/64") })
	p.dnsmasq("--interface=far0", "--interface=far1", "--dhcp-range=fd94::50,fd94::60,64,1h", "--dhcp-range=fd95::,ra-only,64,1h", "--enable-ra",
		"--ra-param=far0,4,600", "--ra-param=far1,4,600",
		"--dhcp-option=option6:dns-server,[fd94::53]", "--dhcp-option=option6:domain-search,corp.example.org")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP6: true}, {Name: "eth1", CIDR: prefix("10.94.1.2/24"), AcceptRA: config.AdvertisementsOff}}})
	n.up(time.Minute)
	eventually.That(t, 30*time.Second, "an address of DHCPv6, a name server and a domain", func() error {
		resolv, err := os.ReadFile(filepath.Join(n.etc, "resolv.conf"))
		if err != nil || !strings.Contains(string(resolv), "nameserver fd94::53\n") || !strings.Contains(string(resolv), "search corp.example.org\n") {
			return fmt.Errorf("resolv.conf: %q (%v)", resolv, err)
		}
		for _, a := range n.address().All {
			if a.IsSingleIP() && prefix("fd94::/64").Contains(a.Addr()) {
				return nil
			}
		}
		return fmt.Errorf("addresses: %v", n.address().All)
	})
	for _, a := range n.address().All {
		if prefix("fd95::/64").Contains(a.Addr()) {
			t.Errorf("eth1 has %s of an advertisement", a)
		}
	}
}

// A network of IPv6 with addresses by DHCPv6 alone, and an unlisted card: the router's flag is enough.
func TestManagedAddressesWithoutConfiguration(t *testing.T) {
	p := newPeer(t)
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1\n"), 0); err != nil {
		t.Fatal(err)
	}
	p.wire("eth0", "far0", "10.96.0.1/24")
	p.do(func() { p.address("far0", "fd96::1/64") })
	p.dnsmasq("--interface=far0", "--dhcp-range=fd96::50,fd96::60,64,1h", "--enable-ra", "--ra-param=far0,4,600")
	n := startNode(t, config.Network{})
	n.up(20 * time.Second)
	eventually.That(t, 30*time.Second, "an address of DHCPv6", func() error {
		o, err := Addresses.Get(n.store, AddressID)
		if err == nil && (len(o.Spec.All) == 0 || !inRange(o.Spec.All)) {
			err = fmt.Errorf("addresses: %v", o.Spec.All)
		}
		return err
	})
}

func inRange(all []netip.Prefix) bool {
	for _, a := range all {
		if prefix("fd96::/120").Contains(a.Addr()) {
			return true
		}
	}
	return false
}

// Routers say that DHCPv6 has names and servers, and addresses come by advertisements (RFC 8415 §18.2.6): they are
// asked for, for as long as the server says, and no address is.
func TestNamesByStatelessDHCPv6(t *testing.T) {
	p := newPeer(t)
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1\n"), 0); err != nil {
		t.Fatal(err)
	}
	p.wire("eth0", "far0", "10.98.0.1/24")
	p.do(func() { p.address("far0", "fd98::1/64") })
	p.dnsmasq("--interface=far0", "--dhcp-range=fd98::,ra-stateless,64,1h", "--enable-ra", "--ra-param=far0,4,600",
		"--dhcp-option=option6:dns-server,[fd98::53]", "--dhcp-option=option6:domain-search,corp.example.org", "--dhcp-option=option6:ntp-server,[fd98::123]",
		"--dhcp-option=option6:information-refresh-time,2h")
	n := startNode(t, config.Network{Interfaces: []config.Interface{static("eth0", "10.98.0.2/24", 0)}})
	n.up(20 * time.Second)
	eventually.That(t, 30*time.Second, "names and servers", func() error {
		o, err := LeaseList.Get(n.store, "eth0-stateless-DHCPv6")
		if err != nil {
			return err
		}
		s, left := o.Spec, time.Until(o.Spec.Expires)
		if len(s.Addresses)+len(s.Problems) > 0 || !slices.Equal(s.Resolvers, []netip.Addr{addr("fd98::53")}) || !slices.Equal(s.Search, []string{"corp.example.org"}) {
			return fmt.Errorf("%+v", s)
		}
		if left < 3*time.Hour || left > 4*time.Hour { // of two refresh times
			return fmt.Errorf("it ends in %s", left)
		}
		return nil
	})
	eventually.That(t, 10*time.Second, "the time server of the answer", func() error {
		o, err := TimeServers.Get(n.store, TimeServersID)
		if err == nil && !slices.Equal(o.Spec, []netip.Addr{addr("fd98::123")}) {
			err = fmt.Errorf("%v", o.Spec)
		}
		return err
	})
	n.follows()
}

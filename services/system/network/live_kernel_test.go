//go:build kernel

package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

func cards(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") }

// becomes waits for the addresses of a link.
func becomes(t *testing.T, link string, want ...string) {
	t.Helper()
	eventually.That(t, 10*time.Second, fmt.Sprintf("%s has %v", link, want), func() error {
		got, err := addressesOf(link)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("it has %v", got)
		}
		return err
	})
}

// Before machined has looked for a configuration, no link is changed. Then,
// without one, every card asks for an address. When a configuration comes it is
// applied, and nothing that the cluster depends on is published before.
func TestMaintenanceThenConfigured(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.15.0.1/24")
	p.wire("eth1", "far1", "10.15.1.1/24")
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	p.dnsmasq("--interface=far0", "--dhcp-range=10.15.0.50,10.15.0.60,2m", "--dhcp-option=option:dns-server,10.15.0.53", "--dhcp-host=*:*:*:*:*:*,box7")
	n := newNode(t, t.TempDir())
	n.run(cards)
	eventually.That(t, 5*time.Second, "networkd waits for machined", func() error {
		if s, _ := n.graph.Status(ID); !strings.Contains(s.Message, "the search for a configuration to end") {
			return fmt.Errorf("%s: %s", s.State, s.Message)
		}
		return nil
	})
	n.stage(configuration.Maintenance)
	// eth1 has a carrier and no server: after linkGrace one address is enough.
	n.up(linkGrace + 10*time.Second)
	if got := n.address(); !prefix("10.15.0.0/24").Contains(got.Primary) {
		t.Fatalf("node address is %+v", got)
	}
	if o, err := Hostnames.Get(n.store, HostnameID); err != nil || o.Spec != "box7" {
		t.Errorf("host name is %q (%v)", o.Spec, err)
	}
	if _, err := os.Stat(n.pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an address of maintenance mode was kept for later boots (%v)", err)
	}

	n.configure(config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.15.0.2/24")},
		{Name: "eth2", CIDR: prefix("10.15.2.2/24")}, // comes later
		{Name: "eth1", Ignore: true},
	}})
	becomes(t, "eth0", "10.15.0.2/24")
	eventually.That(t, 5*time.Second, "the old address is withdrawn", func() error {
		if o, err := Addresses.Get(n.store, AddressID); !errors.Is(err, resource.ErrNotFound) {
			return fmt.Errorf("it is %v (%v)", o.Spec, err)
		}
		return nil
	})
	p.wire("eth2", "far2", "10.15.2.1/24")
	eventually.That(t, 5*time.Second, "the new address is published", func() error {
		_, err := Addresses.Get(n.store, AddressID)
		return err
	})
	if got := n.address(); got.Primary != addr("10.15.0.2") {
		t.Errorf("node address is %+v", got)
	}
	// The next boots know no name of a lease either.
	if o, err := Hostnames.Get(n.store, HostnameID); err != nil || o.Spec != hostnameFromMAC(eth0.Attrs().HardwareAddr) {
		t.Errorf("host name is %q (%v)", o.Spec, err)
	}
	if kept, err := os.ReadFile(n.pin); err != nil || string(kept) != "10.15.0.2\n" {
		t.Errorf("kept address is %q (%v)", kept, err)
	}
}

// dropped is whether the kernel has dropped events, because a socket has had too many.
func dropped() bool {
	text, err := os.ReadFile("/proc/thread-self/net/netlink")
	for line := range strings.Lines(string(text)) {
		// sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode; 0 is NETLINK_ROUTE.
		if f := strings.Fields(line); len(f) > 8 && f[1] == "0" && f[8] != "0" {
			return true
		}
	}
	return err != nil
}

// The kernel drops events of links if too many come at once. Then networkd takes over what
// has changed, and leases stay.
func TestTooManyEvents(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.22.0.1/24")
	p.wire("eth1", "far1", "10.22.1.1/24")
	s := p.shortServer("far0", "10.22.0.1", "10.22.0.77", 600)
	var pause sync.Mutex
	n := startNodeWith(t, t.TempDir(), config.Network{Interfaces: []config.Interface{{Name: "eth0", DHCP: true}, static("eth1", "10.22.1.2/24", 0)}}, func(l netlink.Link) bool {
		pause.Lock()
		defer pause.Unlock()
		return cards(l)
	})
	n.up(10 * time.Second)
	s.set(func(s *shortServer) { s.mute = true })

	pause.Lock()
	eth1, err := netlink.LinkByName("eth1")
	for i := 0; err == nil && !dropped(); i++ {
		err = netlink.LinkSetAlias(eth1, fmt.Sprint(i))
	}
	if err == nil {
		err = netlink.LinkDel(eth1)
	}
	pause.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 10*time.Second, "the lost link is noticed", func() error {
		if got := n.address(); len(got.All) != 1 {
			return fmt.Errorf("the addresses are %v", got.All)
		}
		return nil
	})
	p.wire("eth1", "far2", "10.22.2.1/24")
	becomes(t, "eth1", "10.22.1.2/24")
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.22.0.77/24")
}

// follows waits until networkd has applied the last configuration and has these
// problems.
func (n *node) follows(problems ...string) {
	n.t.Helper()
	if err := Await(n.t.Context(), n.store); err != nil {
		n.t.Fatal(err)
	}
	eventually.That(n.t, 5*time.Second, "networkd says what is wrong", func() error {
		o, err := Statuses.Get(n.store, ID)
		if err != nil || len(o.Spec.Problems) != len(problems) {
			return fmt.Errorf("problems %q (%v)", o.Spec.Problems, err)
		}
		for i, p := range problems {
			if !strings.Contains(o.Spec.Problems[i], p) {
				return fmt.Errorf("problems %q", o.Spec.Problems)
			}
		}
		return nil
	})
}

func static(link, cidr string, mtu int, routes ...config.Route) config.Interface {
	return config.Interface{Name: link, CIDR: prefix(cidr), MTU: mtu, Routes: routes}
}

// The network by which a key server is reached is there before the start: no link is configured otherwise, even for a
// moment.
func TestSettingsBeforeTheStart(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.15.2.1/24")
	n := newNode(t, t.TempDir())
	n.before = &config.Network{Interfaces: []config.Interface{static("eth0", "10.15.2.7/24", 0)}}
	n.change = func(o *Options) {
		ask := sources[0]
		ask.open = func(config.Link, func() string) protocol {
			t.Error("asks for a lease")
			return sources[0].open(config.Link{Name: "eth0"}, func() string { return "" })
		}
		o.sources = []source{ask}
	}
	n.run(cards)
	n.stage(configuration.Searching)
	n.up(listedGrace)
	if got := n.address().Primary; got != addr("10.15.2.7") {
		t.Errorf("the address is %s", got)
	}
}

// Addresses, routes and the MTU follow the configuration, and settings by other
// programs stay.
func TestLiveAddressesAndRoutes(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.16.0.1/24")
	p.wire("eth1", "far1", "10.16.1.1/24")
	foreign, err := netlink.ParseAddr("192.0.2.1/24")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"eth0", "eth1"} {
		l, err := netlink.LinkByName(link)
		if err == nil {
			err = netlink.AddrAdd(l, foreign)
		}
		if err != nil {
			t.Fatal(err)
		}
		foreign = &netlink.Addr{IPNet: ipNet(prefix("198.51.100.1/24"))}
	}
	before, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	mtu := func() int {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		return l.Attrs().MTU
	}
	ignored := config.Interface{Name: "eth1", Ignore: true}
	gw := func(network, gateway string) config.Route {
		return config.Route{Network: prefix(network), Gateway: addr(gateway)}
	}
	first := config.Network{Hostname: "one", Nameservers: []netip.Addr{addr("10.16.0.53")}, Interfaces: []config.Interface{
		static("eth0", "10.16.0.2/24", 0, gw("0.0.0.0/0", "10.16.0.1")), ignored,
	}}
	n := startNode(t, first)
	n.up(5 * time.Second)
	held := n.etc + "/held" // as in a container that has the file mounted
	if err := os.Link(n.etc+"/resolv.conf", held); err != nil {
		t.Fatal(err)
	}
	var problems []string
	check := func(what string, wantMTU int, routesWanted []string, addressesWanted ...string) {
		t.Helper()
		n.follows(problems...)
		same(t, what+": addresses of eth0", addresses(t, "eth0"), addressesWanted...)
		same(t, what+": routes of eth0", routes(t, "eth0"), routesWanted...)
		same(t, what+": addresses of eth1", addresses(t, "eth1"), "198.51.100.1/24")
		if got := mtu(); got != wantMTU {
			t.Errorf("%s: the MTU is %d, want %d", what, got, wantMTU)
		}
	}
	asBefore := func(what string) {
		t.Helper()
		check(what, before.Attrs().MTU, []string{"0.0.0.0/0 via 10.16.0.1 metric 1024"}, "192.0.2.1/24", "10.16.0.2/24")
		n.names("one", "10.16.0.2 one\n", "nameserver 10.16.0.53\n")
	}
	asBefore("at first")

	n.configure(config.Network{Hostname: "two", Nameservers: []netip.Addr{addr("10.16.0.54"), addr("10.16.0.55")}, Interfaces: []config.Interface{
		static("eth0", "10.16.0.2/24", 1400, gw("0.0.0.0/0", "10.16.0.7"), gw("172.20.0.0/16", "10.16.0.8")),
		static("eth0", "10.16.0.3/24", 0), ignored,
	}})
	check("more", 1400, []string{"0.0.0.0/0 via 10.16.0.7 metric 1024", "172.20.0.0/16 via 10.16.0.8 metric 1024"}, "192.0.2.1/24", "10.16.0.2/24", "10.16.0.3/24")
	n.names("two", "10.16.0.2 two\n", "nameserver 10.16.0.54\nnameserver 10.16.0.55\n")
	n.configure(first)
	asBefore("back")
	if got, err := os.ReadFile(held); err != nil || string(got) != "nameserver 10.16.0.53\n" {
		t.Errorf("who holds resolv.conf reads %q (%v)", got, err)
	}

	// A link that isn't managed any more loses our settings, and only those.
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", Ignore: true}, ignored}})
	problems = []string{"the node has no address"}
	check("ignored", before.Attrs().MTU, nil, "192.0.2.1/24")
	problems = nil
	n.configure(first)
	asBefore("no longer ignored")
}

// A configuration with which the node can't work is replaced by the old one:
// everything that it removed is there again.
func TestUnusableChangeIsWithdrawn(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.17.0.1/24")
	p.wire("eth1", "far1", "10.17.1.1/24")
	p.dnsmasq("--interface=far1", "--dhcp-range=10.17.1.50,10.17.1.60,2m")
	good := config.Network{Interfaces: []config.Interface{
		static("eth0", "10.17.0.2/24", 0, config.Route{Network: prefix("0.0.0.0/0"), Gateway: addr("10.17.0.1")}),
		{Name: "eth1", DHCP: true},
	}}
	n := startNode(t, good)
	n.up(10 * time.Second)
	leased := addresses(t, "eth1")
	published := n.address()
	for name, tt := range map[string]struct {
		bad      config.Network
		problems []string
	}{
		"nothing left":        {config.Network{Interfaces: []config.Interface{{Name: "eth0", Ignore: true}, {Name: "eth1", Ignore: true}}}, []string{"the node has no address"}},
		"a link that isn't":   {config.Network{Interfaces: []config.Interface{static("eth7", "10.17.0.2/24", 0), {Name: "eth0", Ignore: true}, {Name: "eth1", Ignore: true}}}, []string{"the node has no address", `interface "eth7" to appear`}},
		"another network":     {config.Network{Interfaces: []config.Interface{static("eth0", "10.99.0.2/24", 0), static("eth1", "10.98.0.2/24", 0)}}, nil},
		"what can't be":       {config.Network{Interfaces: []config.Interface{static("eth0", "10.17.0.2/24", 99999), {Name: "eth1", DHCP: true}}}, []string{"MTU 99999 of eth0"}},
		"a gateway elsewhere": {config.Network{Interfaces: []config.Interface{static("eth0", "10.17.0.2/24", 0, config.Route{Network: prefix("0.0.0.0/0"), Gateway: addr("10.17.9.1")}), {Name: "eth1", DHCP: true}}}, nil},
	} {
		n.configure(tt.bad)
		n.follows(tt.problems...)
		n.configure(good)
		n.follows()
		becomes(t, "eth0", "10.17.0.2/24")
		becomes(t, "eth1", leased...)
		same(t, name+": routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.17.0.1 metric 1024")
		eventually.That(t, 5*time.Second, name+": the address is the old one", func() error {
			if got := n.address(); got.Primary != published.Primary || len(got.All) != len(published.All) {
				return fmt.Errorf("it is %+v", got)
			}
			return nil
		})
	}
}

//go:build kernel

package network

import (
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// An MTU goes up and down a stack of links: a bond of two cards, VLANs on it and on each other, a bridge on a VLAN, and
// a macvlan. Each link can have a smaller one than that below.
func TestMTUOfAStack(t *testing.T) {
	p := newPeer(t)
	p.cable("eth0", "far0")
	p.cable("eth1", "far1")
	stack := func(size int) config.Network {
		return config.Network{Interfaces: []config.Interface{
			{Name: "m0", CIDR: prefix("10.24.3.2/24"), MACVLAN: &config.MACVLAN{Interface: "bond0.8"}, MTU: size - 500},
			{Name: "br0", CIDR: prefix("10.24.1.2/24"), Bridge: &config.Bridge{Interfaces: []string{"bond0.7"}}, MTU: size},
			{Name: "bond0.9", VLANs: []config.VLAN{{ID: 10, CIDR: prefix("10.24.2.2/24")}, {ID: 11, MTU: size - 200}}},
			{Name: "bond0", CIDR: prefix("10.24.0.2/24"), MTU: size, Bond: &config.Bond{Mode: "active-backup", Interfaces: []string{"eth0", "eth1"}},
				VLANs: []config.VLAN{{ID: 7}, {ID: 8, MTU: size - 300}, {ID: 9, Protocol: "802.1ad"}}},
		}}
	}
	n := startNode(t, stack(3000))
	for _, size := range []int{3000, 9000, 1400} {
		n.configure(stack(size))
		mtuIs(t, size, "eth0", "eth1", "bond0", "bond0.7", "br0", "bond0.9", "bond0.9.10")
		mtuIs(t, size-200, "bond0.9.11")
		mtuIs(t, size-300, "bond0.8")
		mtuIs(t, size-500, "m0")
		n.follows()
	}

	// Another program changes the one below.
	l, err := netlink.LinkByName("bond0")
	if err == nil {
		err = netlink.LinkSetMTU(l, 1300)
	}
	if err != nil {
		t.Fatal(err)
	}
	mtuIs(t, 1400, "eth0", "eth1", "bond0", "bond0.7", "br0", "bond0.9", "bond0.9.10")
	n.follows()
}

// An MTU that the link below can't carry is a problem of that link alone, until the one below has a larger one.
func TestMTULargerThanBelow(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.25.0.1/24")
	card := static("eth0", "10.25.0.2/24", 0)
	card.VLANs = []config.VLAN{{ID: 5, CIDR: prefix("10.25.5.2/24"), MTU: 9000}, {ID: 6, CIDR: prefix("10.25.6.2/24")}}
	settings := func() config.Network {
		return config.Network{Interfaces: []config.Interface{card, {Name: "m0", CIDR: prefix("10.25.7.2/24"), MTU: 8000, MACVLAN: &config.MACVLAN{Interface: "eth0"}}}}
	}
	n := startNode(t, settings())
	n.up(listedGrace)
	for link, cidr := range map[string]string{"eth0": "10.25.0.2/24", "eth0.5": "10.25.5.2/24", "eth0.6": "10.25.6.2/24", "m0": "10.25.7.2/24"} {
		becomes(t, link, cidr)
	}
	n.hasProblem("MTU 9000 of eth0.5: numerical result out of range")
	n.hasProblem("MTU 8000 of m0: ")
	mtuIs(t, 1500, "eth0", "eth0.5", "eth0.6", "m0")
	card.MTU = 9000
	n.configure(settings())
	mtuIs(t, 9000, "eth0", "eth0.5", "eth0.6")
	mtuIs(t, 8000, "m0")
	n.follows()
}

// Traffic goes through a VLAN on a VLAN, the outer one of 802.1ad.
func TestVLANOnAVLAN(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", far, "10.26.0.1/24")
	p.do(func() {
		ip(t, "link", "add", "link", far, "name", "outer", "type", "vlan", "proto", "802.1ad", "id", "9")
		ip(t, "link", "add", "link", "outer", "name", "inner", "type", "vlan", "id", "10")
		ip(t, "address", "add", "10.26.10.1/24", "dev", "inner")
		ip(t, "link", "set", "outer", "up")
		ip(t, "link", "set", "inner", "up")
	})
	p.echo()
	settings := func(outer string) config.Network {
		return config.Network{Interfaces: []config.Interface{
			{Name: "eth0", VLANs: []config.VLAN{{ID: 9, Protocol: outer}}},
			{Name: "eth0.9", VLANs: []config.VLAN{{ID: 10, CIDR: prefix("10.26.10.2/24")}}},
		}}
	}
	n := startNode(t, settings("802.1ad"))
	n.up(20 * time.Second)
	connect(t, "10.26.10.1")
	before := indexOf(t, "eth0.9", 0)
	n.configure(settings("802.1q"))
	indexOf(t, "eth0.9", before)
	becomes(t, "eth0.9.10", "10.26.10.2/24")
	if c, err := reach("10.26.10.1", time.Second); err == nil {
		c.Close()
		t.Error("802.1q reaches what is in 802.1ad")
	}
	n.configure(settings("802.1ad"))
	connect(t, "10.26.10.1")
	n.follows()
}

// Each mode of a macvlan, on a link of its own: passthru has it alone.
func TestModesOfAMACVLAN(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.27.0.1/24")
	p.echo()
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", Ignore: true}, {Name: "d0", CIDR: prefix("10.27.1.1/32"), Dummy: true}}})
	for _, mode := range []string{"bridge", "private", "vepa", "passthru"} {
		n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", AcceptRA: config.AdvertisementsOff}, {Name: "m0", CIDR: prefix("10.27.0.2/24"), MACVLAN: &config.MACVLAN{Interface: "eth0", Mode: mode}}}})
		shows(t, "macvlan mode "+mode, "-d", "link", "show", "dev", "m0")
		connect(t, "10.27.0.1")
		n.follows()
	}
}

// Names of links that would be longer than 15 bytes are different ones if their parents are: each VLAN has its own
// address and peer.
func TestLongNamesOfVLANs(t *testing.T) {
	p := newPeer(t)
	var interfaces []config.Interface
	var names []string
	for i, parent := range []string{"eth-storage-a01", "eth-storage-a02"} {
		there := fmt.Sprintf("far%d", i)
		p.wire(parent, there, fmt.Sprintf("10.28.%d.1/24", i))
		p.do(func() {
			ip(t, "link", "add", "link", there, "name", there+".4", "type", "vlan", "id", "4094")
			ip(t, "address", "add", fmt.Sprintf("10.28.10%d.1/24", i), "dev", there+".4")
			ip(t, "link", "set", there+".4", "up")
		})
		interfaces = append(interfaces, config.Interface{Name: parent, VLANs: []config.VLAN{{ID: 4094, CIDR: prefix(fmt.Sprintf("10.28.10%d.2/24", i))}}})
		names = append(names, config.VLANName(parent, 4094))
	}
	p.echo()
	n := startNode(t, config.Network{Interfaces: interfaces})
	n.up(20 * time.Second)
	if names[0] == names[1] || len(names[0]) > 15 {
		t.Errorf("names %q", names)
	}
	for i, name := range names {
		becomes(t, name, fmt.Sprintf("10.28.10%d.2/24", i))
		connect(t, fmt.Sprintf("10.28.10%d.1", i))
	}
	n.follows()
}

// At the next boot, the drivers have found the cards in the other order: the kernel's names are swapped. What the
// configuration calls by an alias, and a member of a bond by its MAC address, is the same card as before, with its
// VLANs, also where an alias is what the kernel calls another card.
func TestOrderOfProbing(t *testing.T) {
	p, dir := newPeer(t), t.TempDir()
	macs := []net.HardwareAddr{{2, 7, 0, 0, 0, 1}, {2, 7, 0, 0, 0, 2}, {2, 7, 0, 0, 0, 3}}
	// finds makes the cards; names are what the kernel calls them, in the order of their addresses.
	finds := func(names ...string) {
		t.Helper()
		for i, name := range names {
			p.cable(name, "far-"+name)
			l, err := netlink.LinkByName(name)
			if err == nil {
				err = netlink.LinkSetHardwareAddr(l, macs[i])
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	settings := config.Network{Interfaces: []config.Interface{
		{Name: "lan0", HardwareAddr: macs[0].String(), CIDR: prefix("10.29.0.2/24"), VLANs: []config.VLAN{{ID: 7, CIDR: prefix("10.29.7.2/24")}}},
		{Name: "eth0", HardwareAddr: macs[1].String(), CIDR: prefix("10.29.1.2/24")},
		{Name: "bond0", CIDR: prefix("10.29.2.2/24"), Bond: &config.Bond{Mode: "active-backup", Interfaces: []string{macs[2].String()}}},
	}}
	has := func(first, second, third string) {
		t.Helper()
		becomes(t, first, "10.29.0.2/24")
		becomes(t, "lan0.7", "10.29.7.2/24")
		becomes(t, second, "10.29.1.2/24")
		memberOf(t, third, "bond0")
		becomes(t, "bond0", "10.29.2.2/24")
		eventually.That(t, 10*time.Second, "lan0.7 is on "+first, func() error {
			v, err1 := netlink.LinkByName("lan0.7")
			l, err2 := netlink.LinkByName("lan0")
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			if l.Attrs().Name != first || v.Attrs().ParentIndex != l.Attrs().Index {
				return fmt.Errorf("lan0 is %s, and lan0.7 is on link %d", l.Attrs().Name, v.Attrs().ParentIndex)
			}
			return nil
		})
	}
	finds("eth1", "eth0", "eth2")
	n := startNodeIn(t, dir, settings)
	n.up(20 * time.Second)
	has("eth1", "eth0", "eth2")
	n.follows()
	n.stop()
	for _, name := range []string{"bond0", "eth0", "eth1", "eth2"} {
		if l, err := netlink.LinkByName(name); err != nil || netlink.LinkDel(l) != nil {
			t.Fatalf("remove %s: %v", name, err)
		}
	}
	finds("eth0", "eth2", "eth1")
	n = startNodeIn(t, dir, settings)
	n.up(20 * time.Second)
	has("eth0", "eth2", "eth1")
	// Only as a second name, the kernel has it for the other card already.
	n.follows("name eth0 of eth2: another program has one like it")
}

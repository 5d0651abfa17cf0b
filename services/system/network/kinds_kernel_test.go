//go:build kernel

package network

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
)

// indexOf waits for a link with another index than before, and returns it.
func indexOf(t *testing.T, link string, before int) (index int) {
	t.Helper()
	eventually.That(t, 10*time.Second, fmt.Sprintf("%s is there, and isn't link %d", link, before), func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		if index = l.Attrs().Index; index == before {
			return errors.New("it is the old one")
		}
		return nil
	})
	return index
}

// tags waits until a bridge or port has these VLANs.
func tags(t *testing.T, link string, want ...int) {
	t.Helper()
	eventually.That(t, 10*time.Second, fmt.Sprintf("%s has the VLANs %v", link, want), func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		all, err := netlink.BridgeVlanList()
		if err != nil {
			return err
		}
		var got []int
		for _, v := range all[int32(l.Attrs().Index)] {
			got = append(got, int(v.Vid))
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}

// Links of each kind are made, on top of each other. What can be changed on them is changed, other options make a new
// link, what another program removes comes back, and all go with their entries.
func TestLinksOfEachKind(t *testing.T) {
	p := newPeer(t)
	for i := range 3 {
		p.wire(fmt.Sprintf("eth%d", i), fmt.Sprintf("far%d", i), fmt.Sprintf("10.18.%d.1/24", i))
	}
	bridge, vrf, mac := &config.Bridge{Interfaces: []string{"eth0"}}, &config.VRF{Table: 1000, Interfaces: []string{"eth1"}}, &config.MACVLAN{Interface: "eth2"}
	settings := func() (n config.Network) {
		b, v, m := *bridge, *vrf, *mac
		n.Interfaces = []config.Interface{
			{Name: "br0", CIDR: prefix("10.18.0.2/24"), MTU: 1400, Bridge: &b, VLANs: []config.VLAN{{ID: 7, CIDR: prefix("10.18.7.2/24")}, {ID: 8, Protocol: "802.1ad"}}},
			{Name: "br0.8", VLANs: []config.VLAN{{ID: 9, CIDR: prefix("10.18.9.2/24")}}},
			{Name: "blue", VRF: &v},
			static("eth1", "10.18.1.2/24", 0, config.Route{Network: prefix("0.0.0.0/0"), Gateway: addr("10.18.1.1")}),
			{Name: "m0", CIDR: prefix("10.18.2.3/24"), MACVLAN: &m},
			static("eth2", "10.18.2.2/24", 0),
			{Name: "v0", CIDR: prefix("10.18.5.1/24"), Veth: &config.Veth{Peer: "v1"}},
			{Name: "d0", CIDR: prefix("10.18.6.1/32"), Dummy: true},
		}
		return n
	}
	n := startNode(t, settings())
	n.up(20 * time.Second)
	everything := func() {
		t.Helper()
		memberOf(t, "eth0", "br0")
		memberOf(t, "eth1", "blue")
		mtuIs(t, 1400, "br0", "eth0", "br0.7", "br0.8.9")
		for link, cidr := range map[string]string{"br0": "10.18.0.2/24", "br0.7": "10.18.7.2/24", "br0.8.9": "10.18.9.2/24", "eth1": "10.18.1.2/24", "m0": "10.18.2.3/24", "v0": "10.18.5.1/24", "d0": "10.18.6.1/32"} {
			becomes(t, link, cidr)
		}
		shows(t, "vlan protocol 802.1ad id 8", "-d", "link", "show", "dev", "br0.8")
		shows(t, "vlan protocol 802.1Q id 9", "-d", "link", "show", "dev", "br0.8.9")
		shows(t, "state UP", "link", "show", "dev", "v1")
		shows(t, "default via 10.18.1.1 dev eth1 proto 103 metric 1024", "route", "show", "table", fmt.Sprint(vrf.Table))
		n.follows()
	}
	everything()
	if node := n.address(); strings.Contains(fmt.Sprint(node.All), "10.18.1.2") {
		t.Errorf("the node has its address in a VRF: %v", node)
	}
	if s, err := Links.Get(n.store, "eth1"); err != nil || s.Spec.Master != "blue" {
		t.Errorf("eth1 is %+v (%v)", s.Spec, err)
	}

	before := indexOf(t, "br0", 0)
	bridge.STP.Enabled, bridge.VLAN.VLANFiltering = true, true
	n.configure(settings())
	shows(t, "stp_state 1", "-d", "link", "show", "dev", "br0")
	shows(t, "vlan_filtering 1", "-d", "link", "show", "dev", "br0")
	tags(t, "br0", 1, 7)
	tags(t, "eth0", 1, 7)
	if after := indexOf(t, "br0", 0); after != before {
		t.Error("the bridge was made anew")
	}
	bridge.STP.Enabled, bridge.VLAN.VLANFiltering, bridge.Interfaces = false, false, []string{"eth0"}
	n.configure(settings())
	shows(t, "stp_state 0", "-d", "link", "show", "dev", "br0")
	tags(t, "eth0", 1)

	table, macvlan := indexOf(t, "blue", 0), indexOf(t, "m0", 0)
	vrf.Table, mac.Mode = 1001, "private"
	n.configure(settings())
	indexOf(t, "blue", table)
	indexOf(t, "m0", macvlan)
	shows(t, "macvlan mode private", "-d", "link", "show", "dev", "m0")
	everything()

	for _, link := range []string{"br0", "blue", "m0", "v1", "d0"} {
		l, err := netlink.LinkByName(link)
		if err == nil {
			err = netlink.LinkDel(l)
		}
		if err != nil {
			t.Fatal(err)
		}
		indexOf(t, link, l.Attrs().Index)
	}
	everything()
	if text := n.console.String(); !strings.Contains(text, "d0 was removed by another program") {
		t.Errorf("the console says %s", text)
	}

	n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.18.0.2/24", 0), static("eth1", "10.18.1.2/24", 0), static("eth2", "10.18.2.2/24", 0)}})
	for _, link := range []string{"br0", "br0.7", "br0.8", "br0.8.9", "blue", "m0", "v0", "v1", "d0"} {
		missingLink(t, link)
	}
	becomes(t, "eth0", "10.18.0.2/24")
	becomes(t, "eth1", "10.18.1.2/24")
	n.follows()
}

// A kind of link that the kernel doesn't have is a problem of that link: the node goes on at once.
func TestKindThatTheKernelDoesNotHave(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.19.0.1/24")
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		static("eth0", "10.19.0.2/24", 0),
		{Name: "wg0", Required: true, CIDR: prefix("10.19.9.2/24"), WireGuard: &config.WireGuard{PrivateKey: "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk="}},
	}})
	n.up(listedGrace / 2)
	eventually.That(t, 5*time.Second, "the problem of wg0", func() error {
		s, err := Links.Get(n.store, "wg0")
		if err == nil && !strings.Contains(s.Spec.Problem, "make the wireguard wg0") {
			err = fmt.Errorf("it is %+v", s.Spec)
		}
		return err
	})
}

// The partner of a bond with LACP is reported.
func TestPartnerOfABond(t *testing.T) {
	p := newPeer(t)
	p.joined(lacpTrunk(), "10.20.0.1/24", "eth0", "eth1")
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		{Name: "bond0", CIDR: prefix("10.20.0.2/24"), Bond: &config.Bond{Mode: "802.3ad", LACPRate: "fast", MIIMon: new(100), Interfaces: []string{"eth0", "eth1"}}},
	}})
	n.up(20 * time.Second)
	partner := p.hardware()
	aggregates(t, 2, partner)
	eventually.That(t, 2*observeEvery, "the partner is "+partner.String(), func() error {
		s, err := Links.Get(n.store, "bond0")
		if err == nil && !strings.HasPrefix(s.Spec.Partner, partner.String()+" key ") {
			err = fmt.Errorf("it is %q", s.Spec.Partner)
		}
		return err
	})
	// The state of its ports is that of the members, and changes with it.
	port := func(link string, holds ...string) {
		t.Helper()
		eventually.That(t, 2*observeEvery+20*time.Second, fmt.Sprintf("the partner's port at %s is %q", link, holds), func() error {
			s, err := Links.Get(n.store, link)
			for _, part := range holds {
				if err == nil && !slices.Contains(strings.Split(s.Spec.Partner, ","), part) {
					err = fmt.Errorf("it is %q", s.Spec.Partner)
				}
			}
			return err
		})
	}
	for _, link := range []string{"eth0", "eth1"} {
		port(link, "active", "short_timeout", "aggregating", "in_sync", "collecting", "distributing")
	}
	p.do(func() {
		l, err := netlink.LinkByName("far-eth1")
		if err == nil {
			err = netlink.LinkSetNoMaster(l) // a cable in another switch, which has no LACP
		}
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			t.Error(err)
		}
	})
	aggregates(t, 1, partner)
	eventually.That(t, 2*observeEvery+20*time.Second, "the partner's port at eth1 doesn't distribute", func() error {
		s, err := Links.Get(n.store, "eth1")
		if err == nil && strings.Contains(s.Spec.Partner, "distributing") {
			err = fmt.Errorf("it is %q", s.Spec.Partner)
		}
		return err
	})
	port("eth0", "in_sync", "distributing")
}

// The primary of a bond is used when it works, and can be another one without a new bond.
func TestPrimaryOfABond(t *testing.T) {
	p := newPeer(t)
	p.joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1")
	settings := func(primary string) config.Network {
		return config.Network{Interfaces: []config.Interface{{Name: "bond0", CIDR: prefix("10.21.0.2/24"), Bond: &config.Bond{
			Mode: "active-backup", MIIMon: new(100), Interfaces: []string{"eth0", "eth1"}, Primary: primary, PrimaryReselect: "always", FailOverMAC: "active", NumPeerNotif: new(3),
		}}}}
	}
	n := startNode(t, settings("eth1"))
	n.up(20 * time.Second)
	uses := func(link string) *netlink.Bond {
		t.Helper()
		index := indexOf(t, link, 0)
		return bondIs(t, "uses "+link, func(b *netlink.Bond) bool { return b.ActiveSlave == index && b.Primary == index })
	}
	first := uses("eth1")
	if first.NumPeerNotif != 3 || first.FailOverMac != netlink.BOND_FAIL_OVER_MAC_ACTIVE {
		t.Errorf("the bond is %+v", first)
	}
	n.configure(settings("eth0"))
	if second := uses("eth0"); second.Index != first.Index {
		t.Error("the bond was made anew")
	}
	n.follows()
}

// Settings of a card's driver are made, on members of a bond, too, and come back. What the driver refuses is a problem
// of its link, which works, and nothing else waits.
func TestDriverOfACard(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.22.0.1/24")
	p.wire("eth1", "far1", "10.22.1.1/24")
	queues := netlink.NewVeth(netlink.LinkAttrs{Name: "eth2", NumRxQueues: 4, NumTxQueues: 4})
	queues.PeerName = "far2"
	if err := netlink.LinkAdd(queues); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(queues) })
	tool, err := ethtool.NewEthtool()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tool.Close)
	card, other, member := static("eth0", "10.22.0.2/24", 0), static("eth2", "10.22.2.2/24", 0), config.Interface{Name: "eth1"}
	bond := config.Interface{Name: "bond0", CIDR: prefix("10.22.1.2/24"), Bond: &config.Bond{Mode: "active-backup", Interfaces: []string{"eth1"}}}
	card.Ethernet = &config.Ethernet{Features: map[string]bool{"tx-tcp-segmentation": false, "rx-gro": true}}
	member.Ethernet = &config.Ethernet{Features: map[string]bool{"tx-udp-segmentation": false}}
	other.Ethernet = &config.Ethernet{Channels: config.EthernetChannels{RX: 3, TX: 2}}
	n := startNode(t, config.Network{Interfaces: []config.Interface{card, member, bond, other, {Name: "far2", Ignore: true}}})
	n.up(10 * time.Second)
	has := func(link, feature string, want bool) {
		t.Helper()
		eventually.That(t, 70*time.Second, fmt.Sprintf("%s of %s is %v", feature, link, want), func() error {
			is, err := tool.Features(link)
			if err == nil && is[feature] != want {
				err = fmt.Errorf("it is %v", is[feature])
			}
			return err
		})
	}
	channels := func(rx, tx uint32) {
		t.Helper()
		eventually.That(t, 70*time.Second, fmt.Sprintf("eth2 has %d and %d channels", rx, tx), func() error {
			is, err := tool.GetChannels("eth2")
			if err == nil && (is.RxCount != rx || is.TxCount != tx) {
				err = fmt.Errorf("it has %+v", is)
			}
			return err
		})
	}
	has("eth0", "tx-tcp-segmentation", false)
	has("eth0", "rx-gro", true)
	has("eth1", "tx-udp-segmentation", false)
	memberOf(t, "eth1", "bond0")
	channels(3, 2)
	n.follows()

	if err := tool.Change("eth0", map[string]bool{"tx-tcp-segmentation": true, "rx-gro": false}); err != nil {
		t.Fatal(err)
	}
	if _, err := tool.SetChannels("eth2", ethtool.Channels{RxCount: 1, TxCount: 4}); err != nil {
		t.Fatal(err)
	}
	has("eth0", "tx-tcp-segmentation", false)
	has("eth0", "rx-gro", true)
	channels(3, 2)

	// No link of this kernel has rings or wakes a machine up, and none has more channels than queues.
	card.Ethernet = &config.Ethernet{Rings: config.EthernetRings{RX: 512}, WakeOnLAN: []string{"magic"}, Features: map[string]bool{"tx-lockless": false, "warp-drive": true}}
	other.Ethernet = &config.Ethernet{Channels: config.EthernetChannels{RX: 5}}
	problems := []string{
		"settings of the driver of eth0: rings: operation not supported\nwakeOnLan: operation not supported\nfeature tx-lockless: ",
		"settings of the driver of eth2: channels: invalid argument",
	}
	refused := config.Network{Interfaces: []config.Interface{card, other, {Name: "eth1", Ignore: true}}}
	n.configure(refused)
	n.follows(problems...)
	becomes(t, "eth0", "10.22.0.2/24")
	n.stop()
	again := startNode(t, refused)
	again.up(listedGrace / 2)
	again.follows(problems...)
	becomes(t, "eth0", "10.22.0.2/24")
	becomes(t, "eth2", "10.22.2.2/24")
}

package network

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

// S-059, S-060, S-092, S-093: one entry of the configuration makes several
// links.
func TestS093OnePlanForEachLink(t *testing.T) {
	t.Parallel()
	bond := &config.Bond{Mode: "802.3ad", MIIMon: new(100), Interfaces: []string{"eth0", "eth1"}}
	wg := &config.WireGuard{}
	plans, virtuals, members := expand([]config.Link{
		{Name: "eth0", MTU: 9000}, // a member of a bond has its own MTU, or the bond's
		{Name: "bond0", Bond: bond, DHCP: true, MTU: 1450},
		{Name: "eth2", VLANs: []config.VLAN{
			{ID: 100, CIDR: netip.MustParsePrefix("10.20.0.2/24"), Routes: []config.Route{{Network: netip.MustParsePrefix("0.0.0.0/0")}}},
			{ID: 4094, DHCP: true, MTU: 1400},
		}},
		{Name: "wg0", WireGuard: wg, Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")}},
		{Name: "eth9", Ignore: true},
		// A bridge on a VLAN and a card, whose MTU goes down to the ports; a VRF, whose members keep their addresses; a
		// cable.
		{Name: "br0", Bridge: &config.Bridge{Interfaces: []string{"eth2.4094", "lan0"}}, MTU: 1400},
		{Name: "blue", VRF: &config.VRF{Table: 1000, Interfaces: []string{"eth3"}}},
		{Name: "eth3", DHCP: true},
		{Name: "v0", Veth: &config.Veth{Peer: "v1"}},
		{Name: "m0", MACVLAN: &config.MACVLAN{Interface: "lan1"}},
	}, func(called string) string { return strings.Replace(called, "lan", "eth1", 1) })
	var names []string
	of := map[string]config.Link{}
	for _, p := range plans {
		names = append(names, p.Name)
		of[p.Name] = p
	}
	if d := cmp.Diff("eth0 bond0 eth2 eth2.100 eth2.4094 wg0 eth9 br0 blue eth3 v0 v1 m0 eth1 eth10", strings.Join(names, " ")); d != "" {
		t.Fatal(d)
	}
	vlan, port := of["eth2.100"], of["eth2.4094"]
	if len(vlan.Addresses) != 1 || len(vlan.Routes) != 1 || vlan.DHCP || port.DHCP || port.MTU != 1400 || of["eth2"].DHCP || of["eth0"].MTU != 9000 || of["eth1"].MTU != 1450 || of["eth10"].MTU != 1400 {
		t.Errorf("plans %+v", plans)
	}
	if !of["eth3"].DHCP || of["eth3"].Table != 1000 || of["blue"].Table != 0 {
		t.Errorf("a VRF and its member: %+v", plans)
	}
	var made []string
	for _, v := range virtuals {
		made = append(made, fmt.Sprint(v.kind(), " ", v.name, " ", v.below, " ", v.members))
	}
	if d := cmp.Diff("bond bond0  [eth0 eth1], vlan eth2.100 eth2 [], vlan eth2.4094 eth2 [], wireguard wg0  [], bridge br0  [eth2.4094 eth10], "+
		"vrf blue  [eth3], veth v0  [], macvlan m0 eth11 []", strings.Join(made, ", ")); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[string]string{"eth0": "bond0", "eth1": "bond0", "eth10": "br0", "eth2.4094": "br0"}, members); d != "" {
		t.Error(d)
	}
}

// S-092: the kernel gets only options of the mode, because it refuses others.
func TestS092BondOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		bond config.Bond
		mode netlink.BondMode
		want string // its files
	}{
		{config.Bond{Mode: "802.3ad", LACPRate: "fast", XmitHashPolicy: "layer3+4", MIIMon: new(100), UpDelay: 200, DownDelay: 200},
			netlink.BOND_MODE_802_3AD, "downdelay:200 lacp_rate:fast miimon:100 updelay:200 xmit_hash_policy:layer3+4"},
		{config.Bond{Mode: "active-backup", LACPRate: "slow", XmitHashPolicy: "layer2", MIIMon: new(100)}, netlink.BOND_MODE_ACTIVE_BACKUP, "miimon:100 xmit_hash_policy:layer2"},
		{config.Bond{Mode: "active-backup", MIIMon: new(0), UpDelay: 200, PeerNotifyDelay: 200, ARPInterval: 100, UseCarrier: new(false)}, netlink.BOND_MODE_ACTIVE_BACKUP, "arp_interval:100 miimon:0 use_carrier:0"},
		{config.Bond{Mode: "balance-xor", LACPRate: "slow", XmitHashPolicy: "layer2+3", MIIMon: new(50)}, netlink.BOND_MODE_BALANCE_XOR, "miimon:50 xmit_hash_policy:layer2+3"},
	} {
		v := virtual{name: "bond0", entry: config.Link{Bond: &tt.bond}}
		got, ok := v.link(0).(*netlink.Bond)
		if !ok || got.Name != "bond0" || got.Mode != tt.mode || tt.bond.ARPInterval == 0 && got.Miimon != *tt.bond.MIIMon {
			t.Errorf("%+v becomes %+v", tt.bond, got)
		}
		if d := cmp.Diff("map["+tt.want+"]", strings.ReplaceAll(fmt.Sprint(v.files()), "bonding/", "")); d != "" {
			t.Errorf("%+v: %s", tt.bond, d)
		}
	}
	vlan, ok := virtual{name: "eth0.7", vlan: config.VLAN{ID: 7}}.link(3).(*netlink.Vlan)
	if !ok || vlan.VlanId != 7 || vlan.ParentIndex != 3 || vlan.VlanProtocol != netlink.VLAN_PROTOCOL_8021Q {
		t.Errorf("VLAN %+v", vlan)
	}
}

// S-105: keys, port, peers; a peer whose name isn't known yet has no address.
func TestS105WireGuard(t *testing.T) {
	t.Parallel()
	const key = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk="
	spec := &config.WireGuard{PrivateKey: key, ListenPort: 51111, FirewallMark: 0x20, Peers: []config.WireGuardPeer{
		{PublicKey: key, PresharedKey: key, Endpoint: "[2001:db8::1]:51820", AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.1.0.7/24")}, PersistentKeepalive: 5 * time.Second},
		{PublicKey: key, Endpoint: "peer.example.org:51820"},
		{PublicKey: key},
	}}
	c, err := wireguardConfig(spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.PrivateKey.String() != key || *c.ListenPort != 51111 || *c.FirewallMark != 0x20 || !c.ReplacePeers || len(c.Peers) != 3 {
		t.Errorf("%+v", c)
	}
	p := c.Peers[0]
	if p.Endpoint.String() != "[2001:db8::1]:51820" || p.AllowedIPs[0].String() != "10.1.0.0/24" || *p.PersistentKeepaliveInterval != 5*time.Second || !p.ReplaceAllowedIPs || p.PresharedKey.String() != key {
		t.Errorf("peer %+v", p)
	}
	if c.Peers[1].Endpoint != nil || c.Peers[2].Endpoint != nil {
		t.Errorf("peers without an address: %+v", c.Peers[1:])
	}
	named := map[string]netip.Addr{"peer.example.org": netip.MustParseAddr("192.0.2.9")}
	later, err := wireguardConfig(spec, named)
	if err != nil || later.Peers[1].Endpoint.String() != "192.0.2.9:51820" {
		t.Errorf("%+v, %v", later.Peers[1], err)
	}
	if again, err := wireguardConfig(spec, nil); err != nil || !reflect.DeepEqual(c, again) || reflect.DeepEqual(c, later) {
		t.Errorf("the address behind a name is not set, or set again (%v)", err)
	}
	for _, broken := range []*config.WireGuard{{PrivateKey: "c2VjcmV0"}, {PrivateKey: key, Peers: []config.WireGuardPeer{{PublicKey: key, PresharedKey: "c2VjcmV0"}}}} {
		if _, err = wireguardConfig(broken, nil); err == nil || strings.Contains(err.Error(), "c2VjcmV0") {
			t.Errorf("a broken key: %v", err)
		}
	}
}

package network

import (
	"net/netip"
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
	bond := &config.Bond{Mode: "802.3ad", Interfaces: []string{"eth0", "eth1"}}
	wg := &config.WireGuard{}
	plans, virtuals, members := expand([]config.Link{
		{Name: "eth0", MTU: 9000}, // a member has the bond's MTU
		{Name: "bond0", Bond: bond, DHCP: true},
		{Name: "eth2", VLANs: []config.VLAN{
			{ID: 100, CIDR: netip.MustParsePrefix("10.20.0.2/24"), Routes: []config.Route{{Network: netip.MustParsePrefix("0.0.0.0/0")}}},
			{ID: 4094, DHCP: true, MTU: 1400},
		}},
		{Name: "wg0", WireGuard: wg, Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.2/24")}},
		{Name: "eth9", Ignore: true},
	})
	var names []string
	for _, p := range plans {
		names = append(names, p.Name)
	}
	if d := cmp.Diff("bond0 eth2 eth2.100 eth2.4094 wg0 eth9 eth0 eth1", strings.Join(names, " ")); d != "" {
		t.Error(d)
	}
	vlan := plans[2]
	if len(vlan.Addresses) != 1 || len(vlan.Routes) != 1 || vlan.DHCP || !plans[3].DHCP || plans[3].MTU != 1400 || plans[1].DHCP {
		t.Errorf("plans %+v", plans)
	}
	if d := cmp.Diff([]virtual{
		{name: "bond0", bond: bond}, {name: "eth2.100", vlan: &tag{"eth2", 100}}, {name: "eth2.4094", vlan: &tag{"eth2", 4094}}, {name: "wg0", wireguard: wg},
	}, virtuals, cmp.AllowUnexported(virtual{}, tag{})); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[string]string{"eth0": "bond0", "eth1": "bond0"}, members); d != "" {
		t.Error(d)
	}
}

// S-092: the kernel gets only options of the mode, because it refuses others.
func TestS092BondOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		bond config.Bond
		mode netlink.BondMode
		lacp netlink.BondLacpRate
		hash netlink.BondXmitHashPolicy
	}{
		{config.Bond{Mode: "802.3ad", LACPRate: "fast", XmitHashPolicy: "layer3+4", MIIMon: new(100), UpDelay: 200, DownDelay: 200},
			netlink.BOND_MODE_802_3AD, netlink.BOND_LACP_RATE_FAST, netlink.BOND_XMIT_HASH_POLICY_LAYER3_4},
		{config.Bond{Mode: "active-backup", LACPRate: "slow", XmitHashPolicy: "layer2", MIIMon: new(100)}, netlink.BOND_MODE_ACTIVE_BACKUP, -1, -1},
		{config.Bond{Mode: "balance-xor", LACPRate: "slow", XmitHashPolicy: "layer2+3", MIIMon: new(50)}, netlink.BOND_MODE_BALANCE_XOR, -1, netlink.BOND_XMIT_HASH_POLICY_LAYER2_3},
	} {
		got, ok := virtual{name: "bond0", bond: &tt.bond}.link(0).(*netlink.Bond)
		if !ok || got.Name != "bond0" || got.Mode != tt.mode || got.LacpRate != tt.lacp || got.XmitHashPolicy != tt.hash ||
			got.Miimon != *tt.bond.MIIMon || got.UpDelay != tt.bond.UpDelay || got.DownDelay != tt.bond.DownDelay {
			t.Errorf("%+v becomes %+v", tt.bond, got)
		}
	}
	vlan, ok := virtual{name: "eth0.7", vlan: &tag{"eth0", 7}}.link(3).(*netlink.Vlan)
	if !ok || vlan.VlanId != 7 || vlan.ParentIndex != 3 {
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
	had := keyed{spec: spec}
	same := *spec
	same.Peers = append([]config.WireGuardPeer{}, spec.Peers...)
	if !samePeers(had, &same, nil) || samePeers(had, &same, named) {
		t.Error("what is the same is set again, or what isn't is not")
	}
	same.Peers[0].PresharedKey = ""
	marked := *spec
	marked.FirewallMark = 0
	if samePeers(had, &same, nil) || samePeers(had, &marked, nil) {
		t.Error("another preshared key or mark is not set")
	}
	same.Peers[0].PresharedKey = key
	same.Peers[2].Endpoint = "192.0.2.1:1"
	if samePeers(had, &same, nil) {
		t.Error("a new endpoint is not set")
	}
	for _, broken := range []*config.WireGuard{{PrivateKey: "c2VjcmV0"}, {PrivateKey: key, Peers: []config.WireGuardPeer{{PublicKey: key, PresharedKey: "c2VjcmV0"}}}} {
		if _, err = wireguardConfig(broken, nil); err == nil || strings.Contains(err.Error(), "c2VjcmV0") {
			t.Errorf("a broken key: %v", err)
		}
	}
}

// Each overflow of the kernel's buffer takes a new subscription. The one before ends, with its socket.
func TestSubscriptionEnds(t *testing.T) {
	t.Parallel()
	o := &owner{Daemon: &Daemon{o: Options{physical: physicalEthernet}}, links: map[string]netlink.Link{}, ups: map[string]string{}, gone: map[int]bool{}}
	first, err := o.subscribe(t.Context())
	if err == nil {
		_, err = o.subscribe(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	for range first.links { // until it is closed
		continue
	}
}

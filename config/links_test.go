package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestSelects(t *testing.T) {
	card := Card{Name: "eth0", HardwareAddr: "02:AB:12:34:00:01", Driver: "virtio_net", BusPath: "0000:00:04.0"}
	for _, tt := range []struct {
		link Link
		want bool
	}{
		{Link{Name: "eth0"}, true},
		{Link{Name: "eth1"}, false},
		{Link{}, false},
		{Link{HardwareAddr: "02:ab:12:34:00:01"}, true},
		{Link{HardwareAddr: "02:ab:12:34:00:02"}, false},
		{Link{HardwareAddr: "02:ab:*"}, true},
		{Link{HardwareAddr: "*:01"}, true},
		{Link{HardwareAddr: "02:ac:*"}, false},
		{Link{Name: "lan0", HardwareAddr: "02:ab:*"}, true},  // an alias
		{Link{Name: "eth0", HardwareAddr: "02:ac:*"}, false}, // also one that is the name of another card
		{Link{Driver: "virtio_net"}, true},
		{Link{Driver: "virtio.net"}, false},
		{Link{Driver: "virtio*"}, true},
		{Link{BusPath: "0000:00:*"}, true},
		{Link{BusPath: "0000:00:04"}, false},
		{Link{HardwareAddr: "02:ab:*", Driver: "virtio_*", BusPath: "*"}, true},
		{Link{HardwareAddr: "02:ab:*", Driver: "e1000"}, false},
	} {
		if got := tt.link.Selects(card); got != tt.want {
			t.Errorf("%q (alias %q): %t", tt.link.selector(), tt.link.Name, got)
		}
	}
	if (Link{HardwareAddr: "*"}).Selects(Card{Name: "eth0"}) != true || (Link{HardwareAddr: "0*"}).Selects(Card{Name: "eth0"}) {
		t.Error("a card without an address")
	}
}

// Case 10: names of VLANs' links fit, say what they are, and differ where their parents do.
func TestVLANName(t *testing.T) {
	for _, tt := range []struct {
		parent string
		id     int
		want   string
	}{
		{"eth0", 4094, "eth0.4094"},
		{"enp129s0f1", 4094, "enp129s0f1.4094"},
		{"enp129s0f1np1", 4094, "enp129@@@@.4094"},
		{"enp129s0f1np1", 5, "enp129s0f1np1.5"},
		{"bond-storage-a", 100, "bond-st@@@@.100"},
		{"bond-storage-b", 100, "bond-st@@@@.100"},
		{"eth-äöüäöü", 4000, "eth-ä@@@@.4000"},
	} {
		name := VLANName(tt.parent, tt.id)
		if i := strings.Index(tt.want, "@@@@"); i >= 0 {
			tt.want = strings.ReplaceAll(tt.want, "@@@@", name[i:i+4])
		}
		if name != tt.want || len(name) > 15 || name != VLANName(tt.parent, tt.id) {
			t.Errorf("VLAN %d of %s: %s, want %s", tt.id, tt.parent, name, tt.want)
		}
	}
	if a, b := VLANName("bond-storage-a", 100), VLANName("bond-storage-b", 100); a == b {
		t.Errorf("two links are %s", a)
	}
}

// shown is what Links makes of the interfaces in a document.
func shown(t *testing.T, interfaces string) string {
	t.Helper()
	c, _ := accepted(t, with(document(t, ControlPlane), "machine", "network: {interfaces: ["+interfaces+"]}"))
	var lines []string
	for _, l := range c.Machine.Network.Links() {
		var parts []string
		for name, is := range map[string]bool{"dhcp": l.DHCP, "dhcp6": l.DHCP6, "required": l.Required, "unaddressed": l.Unaddressed()} {
			if is {
				parts = append(parts, name)
			}
		}
		slices.Sort(parts)
		lines = append(lines, fmt.Sprint(l.Name, " (", l.selector(), ") ", l.Addresses, " ", l.MTU, " ", parts))
	}
	return strings.Join(lines, "\n")
}

// Case 21: an entry, and a member of a bond, can name its card by what doesn't change with the order of drivers.
func TestCase21ChoiceOfACard(t *testing.T) {
	for _, tt := range []struct{ interfaces, want string }{
		{`{hardwareAddr: "02:ab:12:34:00:01", cidr: 10.0.0.5/24}, {hardwareAddr: "02:ab:12:34:00:02", cidr: 10.9.0.5/24}`,
			" (hardwareAddr 02:ab:12:34:00:01) [10.0.0.5/24] 0 []\n (hardwareAddr 02:ab:12:34:00:02) [10.9.0.5/24] 0 []"},
		// Entries of one card, in other spellings of its address, with and without its alias, before and after the
		// entry that gives it.
		{`{hardwareAddr: 02-AB-12-34-00-01, cidr: 10.0.0.5/24}, {interface: lan0, mtu: 1400}, {interface: lan0, hardwareAddr: 02ab.1234.0001}, {hardwareAddr: "02:AB:12:34:00:01", dhcp6: true}`,
			"lan0 (hardwareAddr 02:ab:12:34:00:01) [10.0.0.5/24] 1400 [dhcp6]"},
		{`{driver: igb, busPath: "0000:*", dhcp: true}, {busPath: "0000:*", driver: igb, required: true}, {driver: igb, ignore: true}`,
			" (driver igb, busPath 0000:*) [] 0 [dhcp required]\n (driver igb) [] 0 []"},
		{`{hardwareAddr: "02:AB:12:*", dhcp: true}`, " (hardwareAddr 02:ab:12:*) [] 0 [dhcp]"},
		// DHCP is as it says, and the default only if nothing is said.
		{`{interface: eth0, mtu: 1400}, {interface: eth1, dhcp: false, mtu: 1400}, {interface: eth2, ignore: true}, {interface: eth3, dhcp: false}, {interface: eth3, dhcp: true}`,
			"eth0 () [] 1400 [unaddressed]\neth1 () [] 1400 [unaddressed]\neth2 () [] 0 []\neth3 () [] 0 [dhcp]"},
		{`{interface: eth0, acceptRA: true, mtu: 1400}, {interface: eth1, acceptRA: auto}, {interface: eth2, acceptRA: True}, {interface: eth3, acceptRA: "true"}`,
			"eth0 () [] 1400 []\neth1 () [] 0 [unaddressed]\neth2 () [] 0 []\neth3 () [] 0 []"},
		{`{interface: eth0, acceptRA: false, dhcpOptions: {routeMetric: 5}, vip: {ip: 10.0.0.9}}`, "eth0 () [] 0 [unaddressed]"},
		{`{interface: eth0, routes: [{network: 10.3.0.0/16, gateway: 10.0.0.1}]}, {interface: eth1, vlans: [{vlanId: 5}]}, {interface: bond0, bond: {interfaces: [eth2]}}`,
			"eth0 () [] 0 [unaddressed]\neth1 () [] 0 []\nbond0 () [] 0 []"},
		// A VLAN with an entry of its own has the settings of both.
		{`{interface: eth0.100, vip: {ip: 10.0.0.9}}, {interface: eth0, mtu: 1400, vlans: [{vlanId: 100, cidr: 10.0.0.5/24}, {vlanId: 101, cidr: 10.1.0.5/24}]}`,
			"eth0.100 () [10.0.0.5/24] 1400 []\neth0 () [] 1400 []"},
	} {
		want(t, tt.want, shown(t, tt.interfaces))
	}
	c, _ := accepted(t, with(document(t, Worker), "machine", `network: {interfaces: [{interface: bond0, dhcp: true, bond: {interfaces: [lan0, 02-AB-12-34-00-02, eth7]}}, {interface: lan0, driver: igb, mtu: 9000}]}`))
	want(t, "[lan0 02:ab:12:34:00:02 eth7]", fmt.Sprint(c.Machine.Network.Interfaces[0].Bond.Interfaces))
}

// What works, but hardly as intended, is said with the line and what to do.
func TestDoubtfulNetworks(t *testing.T) {
	const entry = "machine.network.interfaces"
	for _, tt := range []struct{ network, want string }{
		// Case 10
		{"interfaces: [{interface: bond-storage-a, bond: {interfaces: [eth0, eth1]}, vlans: [{vlanId: 100, cidr: 10.31.0.2/24}]}, {interface: bond-storage-b, bond: {interfaces: [eth2, eth3]}, vlans: [{vlanId: 100, cidr: 10.31.1.2/24}]}]", ""},
		// Case 13
		{"interfaces: [{interface: eth0, mtu: 1400}]", entry + "[0]: eth0 gets no address by DHCP: set dhcp, cidr or acceptRA; only interfaces that aren't listed have DHCP by themselves"},
		{"interfaces: [{interface: eth0, vip: {ip: 10.0.0.9}}]", entry + "[0]: eth0 gets no address by DHCP: set dhcp, cidr or acceptRA; only interfaces that aren't listed have DHCP by themselves"},
		{"interfaces: [{hardwareAddr: '02:ab:*'}]", entry + "[0]: hardwareAddr 02:ab:* gets no address by DHCP: set dhcp, cidr or acceptRA; only interfaces that aren't listed have DHCP by themselves"},
		{"interfaces: [{interface: eth0, mtu: 1400}, {interface: eth0, cidr: 10.0.0.5/24}]", ""},
		{"interfaces: [{interface: eth0, ignore: true}]", ""},
		{"interfaces: [{interface: lo, mtu: 1400}]", ""},
		{"interfaces: [{interface: eth0, mtu: 1400}, {interface: bond0, dhcp: true, bond: {interfaces: [eth0]}}]", ""},
		{"interfaces: [{interface: lan0, hardwareAddr: '02:ab:12:34:00:01', mtu: 1400}, {interface: bond0, dhcp: true, bond: {interfaces: ['02:AB:12:34:00:01']}}]", ""},
		// Links of all kinds, on top of each other.
		{"interfaces: [{interface: br0, dhcp: true, bridge: {interfaces: [bond0, eth2.7]}}, {interface: bond0, bond: {interfaces: [eth0, eth1]}}, {interface: eth2, vlans: [{vlanId: 7, protocol: 802.1ad}]}, {interface: br0, vlans: [{vlanId: 9, dhcp: true}]}]", ""},
		{"interfaces: [{interface: blue, vrf: {table: 1000, interfaces: [eth1]}}, {interface: eth1, dhcp: true}, {interface: m0, dhcp: true, macvlan: {interface: eth0}}, {interface: v0, veth: {peer: v1}}, {interface: v1, cidr: 10.7.0.1/24}, {interface: d0, cidr: 10.8.0.1/32, dummy: true}]", ""},
		// Options of bonds that the kernel doesn't use
		{"interfaces: [{interface: bond0, dhcp: true, bond: {mode: active-backup, lacpRate: fast, interfaces: [eth0]}}]", entry + "[0].bond.lacpRate: isn't used with mode active-backup; leave it out"},
		{"interfaces: [{interface: bond0, dhcp: true, bond: {xmitHashPolicy: layer3+4, interfaces: [eth0]}}]", entry + "[0].bond.xmitHashPolicy: isn't used with mode balance-rr; leave it out"},
		{"interfaces: [{interface: bond0, dhcp: true, bond: {miimon: 0, updelay: 200, arpInterval: 100, arpIPTarget: [10.0.0.1], interfaces: [eth0]}}]", entry + "[0].bond.updelay: isn't used with arpInterval; leave it out"},
		{"interfaces: [{interface: bond0, dhcp: true, bond: {mode: balance-tlb, xmitHashPolicy: layer3+4, interfaces: [eth0]}}]", ""},
		// VLANs
		{"interfaces: [{interface: eth0, vlans: [{vlanId: 5, mtu: 9000}, {vlanId: 6, mtu: 1500}]}]", entry + "[0].vlans[0].mtu: 9000 is larger than 1500, which a card has without mtu; set mtu of eth0"},
		{"interfaces: [{interface: eth0, vlans: [{vlanId: 5, cidr: 10.0.0.5/24}]}, {interface: eth0.5, vip: {ip: 10.0.0.9}}]",
			entry + "[1]: eth0.5 is the link of machine.network.interfaces[0].vlans[0], line N: both entries are combined; keep its addresses and routes there"},
		{"interfaces: [{interface: eth0, dhcp: true}, {interface: eth0.5, cidr: 10.0.0.5/24}]", entry + "[1]: nothing in this configuration makes eth0.5: VLAN 5 of eth0 is interface: eth0 with vlans: [{vlanId: 5}]"},
		{"interfaces: [{interface: lan.5, hardwareAddr: '02:ab:12:34:00:01', dhcp: true}, {interface: bond.6, dhcp: true, bond: {interfaces: [eth1]}}]", ""},
		// Addresses
		{"interfaces: [{interface: eth0, cidr: 10.0.0.0/24}]", entry + "[0].cidr: 10.0.0.0/24 is the address of the network itself; did you mean 10.0.0.1/24"},
		{"interfaces: [{interface: eth0, vlans: [{vlanId: 5, cidr: 'fd00::/64'}]}]", entry + "[0].vlans[0].cidr: fd00::/64 is the address of the network itself; did you mean fd00::1/64"},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.0/31}, {interface: eth1, cidr: 10.0.0.0/32}, {interface: eth2, cidr: 'fd00::/127'}, {interface: eth3, cidr: 10.0.1.255/32}, {interface: eth4, cidr: 10.0.1.0/23}]", ""},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/24}, {interface: eth1, cidr: 10.0.0.5/16}]", entry + "[1].cidr: 10.0.0.5 is also the address of eth0 (machine.network.interfaces[0], line N): which link answers for it is open; remove one of them"},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/24, vlans: [{vlanId: 5, cidr: 10.0.0.5/24}]}]", entry + "[0].vlans[0].cidr: 10.0.0.5 is also the address of eth0 (machine.network.interfaces[0], line N): which link answers for it is open; remove one of them"},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/24}, {interface: eth0, cidr: 10.0.0.5/16}, {interface: lo, cidr: 10.0.0.5/32}, {interface: eth1, cidr: 'fe80::1/64'}, {interface: eth2, cidr: 'fe80::1/64'}]", ""},
		{"interfaces: [{interface: eth0, cidr: 10.244.7.5/24}]", entry + "[0].cidr: 10.244.7.5 is inside of 10.244.0.0/16, one of cluster.network.podSubnets: choose another address, or other subnets"},
		{"interfaces: [{interface: eth0, vlans: [{vlanId: 5, cidr: 10.100.0.5/24}]}]", entry + "[0].vlans[0].cidr: 10.100.0.5 is inside of 10.96.0.0/12, one of cluster.network.serviceSubnets: choose another address, or other subnets"},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/8}]", ""},
		// Rules and options without effect
		{"nameservers: [10.0.0.1, 10.96.0.10]", "machine.network.nameservers[1]: 10.96.0.10 is inside of 10.96.0.0/12, one of cluster.network.serviceSubnets: choose another address, or other subnets"},
		{"interfaces: [{interface: eth0, dhcp: true, vip: {ip: 10.244.0.9}}]", entry + "[0].vip.ip: 10.244.0.9 is inside of 10.244.0.0/16, one of cluster.network.podSubnets: choose another address, or other subnets"},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/24, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, table: 100}]}], rules: [{priority: 5, from: 10.0.0.5/32, table: 100}]", ""},
		{"interfaces: [{interface: eth0, cidr: 10.0.0.5/24, dhcpOptions: {routeMetric: 5}}]", entry + "[0].dhcpOptions: have no effect without dhcp: true"},
		{"nameservers: [10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4]", "machine.network.nameservers[3]: programs ask the first 3 name servers only, and never 10.0.0.4; leave out the others"},
		{"nameservers: [10.0.0.1, 10.0.0.2, 10.0.0.3], searchDomains: [Example.org, local], extraHostEntries: [{ip: 10.0.0.9, aliases: [registry.example.org, Registry, node.1]}]", ""},
		// Case 16
		{"interfaces: [{interface: eth0, dhcp: true, vlans: [{vlanId: 103}]}]}\nsysctls: {net.ipv6.conf.eth0.103.disable_ipv6: '1'", `machine.sysctls["net.ipv6.conf.eth0.103.disable_ipv6"]: there is no such parameter; did you mean net/ipv6/conf/eth0.103/disable_ipv6 for the link eth0.103`},
		{"hostname: one}\nsysctls: {net.core.somaxcon: '1'", `machine.sysctls["net.core.somaxcon"]: there is hardly such a parameter; did you mean net.core.somaxconn`},
		{"hostname: one}\nsysctls: {net/ipv4/neigh/eth0/103/retrans_time_ms: '1'", `machine.sysctls["net/ipv4/neigh/eth0/103/retrans_time_ms"]: there is no such parameter; did you mean net/ipv4/neigh/eth0.103/retrans_time_ms for the link eth0.103`},
		{"hostname: one}\nsysctls: {net/ipv6/conf/eth0.103/disable_ipv6: '1', net.ipv4.conf.eth0/103.forwarding: '1', net.ipv4.conf.all.forwarding: '1', net.netfilter.nf_conntrack_max: '1'", ""},
	} {
		_, warnings := accepted(t, with(document(t, ControlPlane), "machine", "network: {"+tt.network+"}"))
		if got := lineNumber.ReplaceAllString(warnings, "line N"); got != tt.want {
			t.Errorf("%s:\n got %s\nwant %s", tt.network, got, tt.want)
		}
	}
}

// A report has the lines, also where the other entry is far away.
func TestDoubtfulNetworksHaveLines(t *testing.T) {
	base := document(t, Worker)
	_, warnings, _ := load(t, with(base, "machine", "network:\n  interfaces:\n    - interface: eth0\n      cidr: 10.0.0.5/24\n    - interface: eth1\n      cidr: 10.0.0.5/24\n"))
	first := strings.Count(base[:strings.Index(base, "machine:\n")], "\n") + 4
	want(t, fmt.Sprintf("test.yaml:%d:9: machine.network.interfaces[1].cidr: 10.0.0.5 is also the address of eth0 (machine.network.interfaces[0], line %d): which link answers for it is open; remove one of them", first+3, first),
		strings.Join(warnings, "\n"))
}

func TestEnds(t *testing.T) {
	for prefix, want := range map[string]string{
		"10.0.0.5/24": "10.0.0.0 10.0.0.255", "10.0.3.5/22": "10.0.0.0 10.0.3.255", "10.0.0.5/30": "10.0.0.4 10.0.0.7", "10.0.0.5/31": "invalid IP invalid IP",
		"1.2.3.4/0": "0.0.0.0 255.255.255.255", "fd00::1/64": "invalid IP invalid IP",
	} {
		network, broadcast := Ends(netip.MustParsePrefix(prefix))
		if got := fmt.Sprint(network, " ", broadcast); got != want {
			t.Errorf("%s: %s, want %s", prefix, got, want)
		}
	}
}

package config

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/google/go-cmp/cmp"
)

// crt is a certificate, as in a document.
var crt = func() string {
	ca, err := pki.NewEtcdCA(time.Now())
	if err != nil {
		panic(err)
	}
	return encodePEM(ca.Cert)
}()

// oneProblem are lines added to a section of a valid document, and the problem that
// Load reports for the whole document: path and words. Positions are tested separately.
var oneProblem = []struct{ section, lines, want string }{
	// Structure.
	{"machine", "tokn: x", `machine.tokn: unknown key; did you mean token`},
	{"machine", "instal: {disk: /dev/sda}", `machine.instal: unknown key; did you mean install`},
	{"cluster", "podSubnets: [10.0.0.0/8]", `cluster.podSubnets: unknown key; did you mean cluster.network.podSubnets`},
	{"cluster", "hostname: x", `cluster.hostname: unknown key; did you mean machine.network.hostname`},
	{"machine", "time: {zone: x}", `machine.time.zone: unknown key; known here are servers, disabled, bootTimeout`},
	{"machine", "env: {a: 1}\nenv: {b: 1}", `machine.env: is given twice, first on line N`},
	{"machine", "env: {a: 1, a: 2}", `machine.env.a: is given twice, first on line N`},
	{"machine", "? [a]\n: b", `machine[""]: a key must be text, not a list`},
	{"machine", "<<: {env: {a: b}}", `machine["<<"]: merging with << isn't supported; write the fields out, or use an alias for the whole value`},
	// Types.
	{"machine", "env: [a]", `machine.env: must be a mapping, not a list`},
	{"machine", "files: {}", `machine.files: must be a list, not a mapping`},
	{"machine", "certSANs: a.example.org", `machine.certSANs: must be a list, not text`},
	{"machine", "certSANs: [[a]]", `machine.certSANs[0]: must be text, not a list`},
	{"machine", "certSANs: [a, null]", `machine.certSANs[1]: is an empty entry of a list`},
	{"machine", "time: soon", `machine.time: must be a mapping, not text`},
	{"machine", "time: {disabled: yes}", `machine.time.disabled: must be true or false, not "yes"`},
	{"machine", "time: {disabled: [true]}", `machine.time.disabled: must be true or false, not a list`},
	{"machine", "time: {bootTimeout: 30}", `machine.time.bootTimeout: lacks a unit; did you mean 30s`},
	{"machine", "time: {bootTimeout: soon}", `machine.time.bootTimeout: "soon" is not a duration, such as 30s or 5m`},
	{"machine", "time: {bootTimeout: -1s}", `machine.time.bootTimeout: must not be negative`},
	{"machine", "network: {hostname: true}", `machine.network.hostname: must be text, not a boolean; quote it`},
	{"machine", "network: {hostname: !secret x}", `machine.network.hostname: the tag "!secret" isn't supported`},
	{"machine", "network: {nameservers: [10.0.0.300]}", `machine.network.nameservers[0]: "10.0.0.300" is not an IP address, such as 10.0.0.1`},
	{"machine", "network: {nameservers: ['']}", `machine.network.nameservers[0]: is empty`},
	{"machine", "network: {nameservers: [{}]}", `machine.network.nameservers[0]: must be text, not a mapping`},
	{"machine", "network: {interfaces: [{interface: eth0, mtu: big}]}", `machine.network.interfaces[0].mtu: must be a whole number, not "big"`},
	{"machine", "network: {interfaces: [{interface: eth0, routes: [{network: 0.0.0.0/0, metric: -1}]}]}",
		`machine.network.interfaces[0].routes[0].metric: must be a whole number from 0 to 4294967295, not "-1"`},
	{"machine", "env: {a: [b]}", `machine.env.a: must be text, not a list`},
	{"machine", "files: [{path: /etc/a, permissions: 644x}]", `machine.files[0].permissions: not octal permissions between 0000 and 0777, such as 0644`},
	{"machine", "files: [{path: /etc/a, permissions: 0888}]", `machine.files[0].permissions: not octal permissions between 0000 and 0777, such as 0644`},
	{"machine", "files: [{path: /etc/a, op: appendd}]", `machine.files[0].op: "appendd" is not one of create, append, overwrite; did you mean append`},
	{"cluster", "proxy: {mode: ebpf}", `cluster.proxy.mode: "ebpf" is not one of nftables, iptables, ipvs`},
	{"machine", "registries: {config: {a: {tls: {ca: '-----BEGIN CERTIFICATE-----'}}}}", `machine.registries.config.a.tls.ca: PEM must be base64-encoded once more (base64 -w0 FILE)`},
	{"machine", "registries: {config: {a: {tls: {ca: '%%%'}}}}", `machine.registries.config.a.tls.ca: not base64`},
	{"machine", "registries: {config: {a: {tls: {ca: YWJj}}}}", `machine.registries.config.a.tls.ca: no PEM inside the base64`},
	// Addresses and links.
	{"machine", "network: {hostname: My_Host}", `machine.network.hostname: "My_Host" must be of lower-case letters, digits, dashes and dots, 63 at most: Kubernetes names the node after it`},
	{"machine", "network: {nameservers: [0.0.0.0]}", `machine.network.nameservers[0]: 0.0.0.0 can't be the address of a server`},
	{"machine", "network: {interfaces: [{cidr: 10.0.0.1/8}]}", `machine.network.interfaces[0].interface: is missing: or hardwareAddr, driver or busPath, which select a card`},
	{"machine", "network: {firewall: {nodeNetworks: [10.0.0.1/8]}}", `machine.network.firewall.nodeNetworks[0]: 10.0.0.1/8 has bits set outside of its prefix; did you mean 10.0.0.0/8`},
	{"machine", "network: {firewall: {rules: [{action: accept}]}}", `machine.network.firewall.rules[0].name: "" must be of 1 to 32 lower-case letters, digits and dashes, and no other rule's name`},
	{"machine", "network: {firewall: {rules: [{name: Web, action: accept}]}}", `machine.network.firewall.rules[0].name: "Web" must be of 1 to 32 lower-case letters, digits and dashes, and no other rule's name`},
	{"machine", "network: {firewall: {rules: [{name: a, action: accept}, {name: a, action: accept}]}}", `machine.network.firewall.rules[1].name: "a" must be of 1 to 32 lower-case letters, digits and dashes, and no other rule's name`},
	{"machine", "network: {firewall: {rules: [{name: a, action: reject}]}}", `machine.network.firewall.rules[0].action: "reject" is not one of accept, drop`},
	{"machine", "network: {firewall: {rules: [{name: a, action: accept, protocol: gre}]}}", `machine.network.firewall.rules[0].protocol: "gre" is not one of tcp, udp, icmp`},
	{"machine", "network: {firewall: {rules: [{name: a, action: accept, ports: [80]}]}}", `machine.network.firewall.rules[0].ports: need protocol tcp or udp`},
	{"machine", "network: {firewall: {rules: [{name: a, action: accept, protocol: icmp, ports: [80]}]}}", `machine.network.firewall.rules[0].ports: need protocol tcp or udp`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop, protocol: tcp, ports: [80, http]}]}}", `machine.network.firewall.rules[0].ports[1]: "http" is neither a port nor a range of ports, such as 443 or 8000-8100`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop, protocol: tcp, ports: [90-80]}]}}", `machine.network.firewall.rules[0].ports[0]: "90-80" is neither a port nor a range of ports, such as 443 or 8000-8100`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop, protocol: udp, ports: [65536]}]}}", `machine.network.firewall.rules[0].ports[0]: "65536" is neither a port nor a range of ports, such as 443 or 8000-8100`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop, interface: a-name-of-16-bytes}]}}", `machine.network.firewall.rules[0].interface: "a-name-of-16-bytes" is longer than the 15 bytes that Linux allows`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop, sources: [10.0.0.0/8], destinations: ['fd00::1/128']}]}}", `machine.network.firewall.rules[0]: matches no packet: its sources and destinations are of different address families`},
	{"machine", "network: {firewall: {rules: [{name: a, action: drop}]}}", `machine.network.firewall.rules[0]: drops the machine API, tcp port 50000, from everywhere: gbctl couldn't reach the node any more; put a rule before this one that accepts the port from where you work`},
	{"machine", "network: {firewall: {rules: [{name: b, action: accept, protocol: tcp, ports: [22]}, {name: a, action: drop, protocol: tcp, ports: [40000-60000], sources: [0.0.0.0/0]}]}}", `machine.network.firewall.rules[1]: drops the machine API, tcp port 50000, from everywhere: gbctl couldn't reach the node any more; put a rule before this one that accepts the port from where you work`},
	{"machine", "network: {interfaces: [{interface: a-name-of-16-bytes}]}", `machine.network.interfaces[0].interface: "a-name-of-16-bytes" is longer than the 15 bytes that Linux allows`},
	{"machine", "network: {interfaces: [{interface: eth/0}]}", `machine.network.interfaces[0].interface: "eth/0" can't be the name of an interface`},
	{"machine", "network: {interfaces: [{interface: eth0, mtu: 10}]}", `machine.network.interfaces[0].mtu: 10 is out of range (68 to 65535 bytes)`},
	{"machine", "network: {interfaces: [{interface: eth0, mtu: 1400}, {interface: eth0, mtu: 1500}]}", `machine.network.interfaces[1].mtu: 1500 contradicts 1400 in an earlier entry for eth0`},
	{"machine", "network: {interfaces: [{interface: eth0, ignore: true, dhcp: true}]}", `machine.network.interfaces[0].ignore: contradicts the rest of the entry: an ignored interface isn't configured`},
	{"machine", "network: {interfaces: [{interface: eth0, ignore: true}, {interface: eth0, dhcp: true}]}", `machine.network.interfaces[1]: contradicts an earlier entry for eth0: one of them ignores it`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.1}]}", `machine.network.interfaces[0].cidr: lacks the prefix length; did you mean 10.0.0.1/24`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 'fd00::1'}]}", `machine.network.interfaces[0].cidr: lacks the prefix length; did you mean fd00::1/64`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: a/b}]}", `machine.network.interfaces[0].cidr: "a/b" is not an address with a prefix length, such as 10.0.0.1/24`},
	{"machine", "network: {interfaces: [{interface: eth0, routes: [{gateway: 10.0.0.1}]}]}", `machine.network.interfaces[0].routes[0].network: is missing: 0.0.0.0/0 is the default route`},
	{"machine", "network: {interfaces: [{interface: eth0, routes: [{network: 0.0.0.0}]}]}", `machine.network.interfaces[0].routes[0].network: lacks the prefix length; did you mean 0.0.0.0/0`},
	{"machine", "network: {interfaces: [{interface: eth0, routes: [{network: 10.0.0.1/8}]}]}", `machine.network.interfaces[0].routes[0].network: 10.0.0.1/8 has bits set outside of its prefix; did you mean 10.0.0.0/8`},
	{"machine", "network: {interfaces: [{interface: eth0, routes: [{network: 10.0.0.0/8, gateway: 'fe80::1'}]}]}", `machine.network.interfaces[0].routes[0].gateway: fe80::1 is of another address family than 10.0.0.0/8`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {mode: lacp, interfaces: [eth0]}}]}", `machine.network.interfaces[0].bond.mode: "lacp" is not one of balance-rr, active-backup, balance-xor, broadcast, 802.3ad, balance-tlb, balance-alb`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {}}]}", `machine.network.interfaces[0].bond.interfaces: is missing: a bond needs members`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [bond0]}}]}", `machine.network.interfaces[0].bond.interfaces[0]: "bond0" is on top of itself, or of more than 8 links: Linux allows neither`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0, eth0]}}]}", `machine.network.interfaces[0].bond.interfaces[1]: "eth0" is already a member of bond0`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], miimon: 0}}]}", `machine.network.interfaces[0].bond.miimon: 0 turns the link checks off: the bond would go on to use a member whose link has failed; leave it out for 100 ms`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], updelay: 150}}]}", `machine.network.interfaces[0].bond.updelay: 150 ms is not a multiple of miimon, 100 ms`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], primary: eth0}}]}", `machine.network.interfaces[0].bond.primary: is an option of active-backup, balance-tlb, balance-alb, and the mode of "bond0" is balance-rr`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {mode: active-backup, interfaces: [eth0], primary: eth1}}]}", `machine.network.interfaces[0].bond.primary: "eth1" is not one of eth0; did you mean eth0`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {mode: 802.3ad, interfaces: [eth0], adUserPortKey: 1024}}]}", `machine.network.interfaces[0].bond.adUserPortKey: 1024 is out of range (0 to 1023)`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {mode: 802.3ad, interfaces: [eth0], adActorSystem: x}}]}", `machine.network.interfaces[0].bond.adActorSystem: "x" is not a MAC address for a bond of mode 802.3ad`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], arpInterval: 100}}]}", `machine.network.interfaces[0].bond.arpIPTarget: is missing: arpInterval needs it`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], arpInterval: 100, arpIPTarget: [10.0.0.1], miimon: 100}}]}", `machine.network.interfaces[0].bond.miimon: contradicts arpInterval: the kernel allows one of both`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], arpInterval: 100, arpIPTarget: ['fd00::1']}}]}", `machine.network.interfaces[0].bond.arpIPTarget: must have IPv4 addresses only`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], arpInterval: 100, arpIPTarget: [10.0.0.1], miimon: 0, arpMissedMax: 256}}]}", `machine.network.interfaces[0].bond.arpMissedMax: 256 is out of range (1 to 255)`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], mode: 802.3ad, arpMissedMax: 3}}]}", `machine.network.interfaces[0].bond.arpMissedMax: is an option of active-backup, balance-rr, balance-xor, broadcast, and the mode of "bond0" is 802.3ad`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], lacpActive: false}}]}", `machine.network.interfaces[0].bond.lacpActive: is an option of 802.3ad, and the mode of "bond0" is balance-rr`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], peerNotifyDelay: 150}}]}", `machine.network.interfaces[0].bond.peerNotifyDelay: 150 ms is not a multiple of miimon, 100 ms`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], arpValidate: filters}}]}", `machine.network.interfaces[0].bond.arpValidate: "filters" is not one of none, active, backup, all, filter, filter_active, filter_backup; did you mean filter`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0], nsIP6Target: ['fd00::1']}}]}", `machine.network.interfaces[0].bond.nsIP6Target: unknown key; the kernel has this option of a bond only in messages that the node can't send`},
	{"machine", "network: {interfaces: [{interface: eth0, vlans: [{vlanId: 4095}]}]}", `machine.network.interfaces[0].vlans[0].vlanId: 4095 is out of range (1 to 4094)`},
	{"machine", "network: {interfaces: [{interface: eth0, vlans: [{vlanId: 1}, {vlanId: 1}]}]}", `machine.network.interfaces[0].vlans[1].vlanId: 1 is given twice for eth0`},
	{"machine", "network: {interfaces: [{interface: eth0, vip: {}}]}", `machine.network.interfaces[0].vip.ip: is missing`},
	{"machine", "network: {interfaces: [{interface: wg0, cidr: 10.0.0.1/8, vip: {ip: 10.0.0.2}, wireguard: {privateKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=}}]}", `machine.network.interfaces[0].vip: isn't possible on WireGuard, which has no neighbour discovery`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.1/8, vip: {ip: 10.0.0.1}}]}", `machine.network.interfaces[0].vip.ip: 10.0.0.1 is also an address of the interface: it must be unused, because it moves between nodes`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.1/8}, {interface: eth1, vip: {ip: 10.0.0.1}}]}", `machine.network.interfaces[1].vip.ip: 10.0.0.1 is also an address of eth0: it must be unused, because it moves between nodes`},
	{"machine", "network: {interfaces: [{interface: eth0, vip: {ip: 10.0.0.9}}, {interface: eth1, vip: {ip: 10.0.0.9}}]}", `machine.network.interfaces[1].vip.ip: 10.0.0.9 is also an address of eth0: it must be unused, because it moves between nodes`},
	{"machine", "network: {interfaces: [{interface: eth0, vip: {ip: \"fe80::9%eth0\"}}]}", `machine.network.interfaces[0].vip.ip: fe80::9%eth0 is not an address at which other hosts can reach a machine: it must be an IPv4 or a global IPv6 address`},
	{"machine", "network: {interfaces: [{interface: eth0, vip: {ip: \"::ffff:10.0.0.9\"}}]}", `machine.network.interfaces[0].vip.ip: ::ffff:10.0.0.9 is not an address at which other hosts can reach a machine: it must be an IPv4 or a global IPv6 address`},
	{"machine", "network: {interfaces: [{interface: eth0, vip: {ip: 239.0.0.9}}]}", `machine.network.interfaces[0].vip.ip: 239.0.0.9 is not an address at which other hosts can reach a machine: it must be an IPv4 or a global IPv6 address`},
	{"machine", "network: {interfaces: [{interface: wg0, wireguard: {privateKey: abc}}]}", `machine.network.interfaces[0].wireguard.privateKey: must be base64 of 32 bytes, as wg genkey prints it`},
	{"machine", "network: {interfaces: [{interface: wg0, wireguard: {privateKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=, peers: [{publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=, presharedKey: abc}]}}]}",
		`machine.network.interfaces[0].wireguard.peers[0].presharedKey: must be base64 of 32 bytes, as wg genpsk prints it`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, dhcpOptions: {userClass: " + strings.Repeat("a", 255) + "}}]}",
		`machine.network.interfaces[0].dhcpOptions: has a text of 255 bytes, and an option holds 254 at most: shorten it`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, dhcpOptions: {userClass: a}}, {interface: eth0, dhcpOptions: {userClass: b}}]}",
		`machine.network.interfaces[1].dhcpOptions.userClass: b contradicts a in an earlier entry for eth0`},
	// Cards.
	{"machine", "network: {interfaces: [{hardwareAddr: '02:ab'}]}", `machine.network.interfaces[0].hardwareAddr: "02:ab" is not a MAC address, such as 02:ab:12:34:00:01, or 02:ab:* for all that begin so`},
	{"machine", "network: {interfaces: [{hardwareAddr: '02:xy:*'}]}", `machine.network.interfaces[0].hardwareAddr: "02:xy:*" is not a MAC address, such as 02:ab:12:34:00:01, or 02:ab:* for all that begin so`},
	{"machine", "network: {interfaces: [{hardwareAddr: '01:00:5e:00:00:01'}]}", `machine.network.interfaces[0].hardwareAddr: 01:00:5e:00:00:01 is the address of a group, and no card has such an address`},
	{"machine", "network: {interfaces: [{interface: lan0, dhcp: true, hardwareAddr: '02:ab:12:34:00:01'}, {interface: lan1, dhcp: true, hardwareAddr: 02-AB-12-34-00-01}]}",
		`machine.network.interfaces[1]: 02:ab:12:34:00:01 selects the card of lan0, too: give all entries of one card the same alias`},
	{"machine", "network: {interfaces: [{dhcp: true, hardwareAddr: '02:ab:12:34:00:01'}, {hardwareAddr: '02:ab:12:34:00:01', driver: e1000, mtu: 1400}]}",
		`machine.network.interfaces[1]: 02:ab:12:34:00:01 selects the card of hardwareAddr 02:ab:12:34:00:01, too: give all entries of one card the same alias`},
	{"machine", "network: {interfaces: [{interface: lan0, dhcp: true, driver: igb}, {interface: lan1, dhcp: true, driver: igb}]}", `machine.network.interfaces[1]: driver igb selects the card of lan0, too: give all entries of one card the same alias`},
	{"machine", "network: {interfaces: [{dhcp: true, driver: 'igb 2'}]}", `machine.network.interfaces[0].driver: "igb 2" is not the driver of a card, such as virtio_net and 0000:00:04.0`},
	{"machine", "network: {interfaces: [{interface: lan0, dhcp: true, driver: e1000}, {interface: lan0, driver: igb}]}", `machine.network.interfaces[1].driver: igb contradicts e1000 in an earlier entry for lan0`},
	{"machine", "network: {interfaces: [{interface: bond0, driver: e1000, bond: {interfaces: [eth0]}}]}", `machine.network.interfaces[0]: driver e1000 selects a card, and bond0 is none: the node makes it`},
	{"machine", "network: {interfaces: [{interface: wg0, hardwareAddr: '02:ab:*', wireguard: {privateKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=}}]}", `machine.network.interfaces[0]: hardwareAddr 02:ab:* selects a card, and wg0 is none: the node makes it`},
	{"machine", "network: {interfaces: [{interface: lo, busPath: '0000:*'}]}", `machine.network.interfaces[0]: busPath 0000:* selects a card, and lo is none: the node makes it`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, vlans: [{vlanId: 100}]}, {interface: eth0.100, driver: e1000}]}", `machine.network.interfaces[0].vlans[0].vlanId: the link of this VLAN would be eth0.100, and machine.network.interfaces[1], line N is for a link of this name: keep only one of them`},
	{"machine", "network: {interfaces: [{interface: bond0, dhcp: true, bond: {interfaces: ['02:AB:12:34:00:01', lan0]}}, {interface: lan0, hardwareAddr: '02:ab:12:34:00:01'}]}", `machine.network.interfaces[0].bond.interfaces[1]: "lan0" is already a member of bond0`},
	{"machine", "network: {interfaces: [{interface: bond0, dhcp: true, bond: {interfaces: [02-AB-12-34-00-01]}}, {interface: lan0, dhcp: true, hardwareAddr: '02:ab:12:34:00:01'}]}",
		`machine.network.interfaces[1].interface: "lan0" is a member of bond0: addresses, DHCP, routes and VLANs belong to the bond`},
	{"machine", "network: {interfaces: [{interface: bond0, dhcp: true, bond: {interfaces: ['02:ab:*']}}]}", `machine.network.interfaces[0].bond.interfaces[0]: "02:ab:*" can't be the name of an interface`},
	{"machine", "network: {interfaces: [{interface: eth0, acceptRA: true}, {interface: eth0, acceptRA: false}]}", `machine.network.interfaces[1].acceptRA: false contradicts true in an earlier entry for eth0`},
	{"machine", "network: {interfaces: [{interface: eth0, acceptRA: never}]}", `machine.network.interfaces[0].acceptRA: "never" is not one of auto, true, false`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcpOptions: {routeMetric: 5}}, {interface: eth0, dhcpOptions: {routeMetric: 6}}]}", `machine.network.interfaces[1].dhcpOptions.routeMetric: 6 contradicts 5 in an earlier entry for eth0`},
	{"machine", "network: {interfaces: [{interface: lo, dhcp6: true}]}", `machine.network.interfaces[0]: has dhcp6 or acceptRA, and there is no router on lo; leave them out`},
	{"machine", "network: {interfaces: [{interface: eth0, ignore: true, required: true}]}", `machine.network.interfaces[0].ignore: contradicts the rest of the entry: an ignored interface isn't configured`},
	// Names of VLANs' links.
	{"machine", "network: {interfaces: [{interface: bond-storage-a, dhcp: true, vlans: [{vlanId: 100}]}, {interface: bond-st6c93, dhcp: true, vlans: [{vlanId: 100}]}]}",
		`machine.network.interfaces[1].vlans[0].vlanId: the link of this VLAN would be bond-st6c93.100, and so would that of machine.network.interfaces[0].vlans[0], line N: choose another name for one of the interfaces`},
	{"machine", "network: {interfaces: [{interface: lan0, hardwareAddr: '02:ab:12:34:00:01', vlans: [{vlanId: 100}]}, {interface: lan0.100, dhcp: true}]}",
		`machine.network.interfaces[0].vlans[0].vlanId: the link of this VLAN would be lan0.100, and machine.network.interfaces[1], line N is for a link of this name: keep only one of them`},
	{"machine", "network: {interfaces: [{interface: eth0, vlans: [{vlanId: 100}]}, {interface: eth0.100, bond: {interfaces: [eth1]}}]}",
		`machine.network.interfaces[0].vlans[0].vlanId: the link of this VLAN would be eth0.100, and machine.network.interfaces[1], line N is for a link of this name: keep only one of them`},
	// Addresses, routes and rules.
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.255/24}]}", `machine.network.interfaces[0].cidr: 10.0.0.255 is the broadcast address of 10.0.0.0/24, which no host can have`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, vlans: [{vlanId: 5, cidr: 10.0.3.255/22}]}]}", `machine.network.interfaces[0].vlans[0].cidr: 10.0.3.255 is the broadcast address of 10.0.0.0/22, which no host can have`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.5/24, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.5}]}]}", `machine.network.interfaces[0].routes[0].gateway: 10.0.0.5 is the address of this node itself, on eth0: a gateway is another machine`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, gateway: 10.0.0.5}], vlans: [{vlanId: 7, cidr: 10.0.0.5/24}]}]}",
		`machine.network.interfaces[0].routes[0].gateway: 10.0.0.5 is the address of this node itself, on VLAN 7 of eth0: a gateway is another machine`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 10.0.0.5/24}, {interface: eth0, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.0}]}]}", `machine.network.interfaces[1].routes[0].gateway: 10.0.0.0 is the first or the last address of 10.0.0.0/24, which no gateway can have`},
	{"machine", "network: {interfaces: [{interface: eth0, vlans: [{vlanId: 7, cidr: 10.0.0.5/24, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.255}]}]}]}",
		`machine.network.interfaces[0].vlans[0].routes[0].gateway: 10.0.0.255 is the first or the last address of 10.0.0.0/24, which no gateway can have`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, gateway: 10.0.0.1, type: blackhole}]}]}", `machine.network.interfaces[0].routes[0].type: a route of type blackhole sends nothing, so it has neither gateway nor source`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, type: blakhole}]}]}", `machine.network.interfaces[0].routes[0].type: "blakhole" is not one of unicast, blackhole, unreachable, prohibit; did you mean blackhole`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, source: 'fd00::5'}]}]}", `machine.network.interfaces[0].routes[0].source: fd00::5 is of another address family than 10.3.0.0/16`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, table: 255}]}]}", `machine.network.interfaces[0].routes[0].table: 255 is the table of the kernel's own addresses; choose another one`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, table: 4294967296}]}]}", `machine.network.interfaces[0].routes[0].table: must be a whole number from 0 to 4294967295, not "4294967296"`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, mtu: 10}]}]}", `machine.network.interfaces[0].routes[0].mtu: 10 is out of range (68 to 65535 bytes)`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 0.0.0.0/24}]}", `machine.network.interfaces[0].cidr: 0.0.0.0 can't be the address of a host`},
	{"machine", "network: {interfaces: [{interface: eth0, cidr: 'ff02::1/64'}]}", `machine.network.interfaces[0].cidr: ff02::1 can't be the address of a host`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, routes: [{network: 10.3.0.0/16, gateway: 0.0.0.0}]}]}", `machine.network.interfaces[0].routes[0].gateway: 0.0.0.0 can't be the address of a gateway; without gateway, the network is directly on the link`},
	{"machine", "network: {interfaces: [{hardwareAddr: '02:ab:*', dhcp: true, vip: {ip: 10.0.0.9}}]}", `machine.network.interfaces[0].interface: is missing: an alias for the card: commands show the shared address with the name of its link`},
	{"machine", "network: {rules: [{from: 10.0.0.0/8, table: 254}]}", `machine.network.rules[0].priority: is missing: 1 to 32765, the lowest is first`},
	{"machine", "network: {rules: [{priority: 32766, from: 10.0.0.0/8, table: 254}]}", `machine.network.rules[0].priority: 32766 is out of range (1 to 32765)`},
	{"machine", "network: {rules: [{priority: 5, from: 10.0.0.0/8, table: 254}, {priority: 5, fwMark: 1, table: 254}]}", `machine.network.rules[1].priority: 5 is also that of an earlier rule: which of them is first would be open`},
	{"machine", "network: {rules: [{priority: 5, table: 254}]}", `machine.network.rules[0]: needs from, to or fwMark: the rule would be for all packets; 0.0.0.0/0 or ::/0 says so`},
	{"machine", "network: {rules: [{priority: 5, from: 10.0.0.0/8}]}", `machine.network.rules[0].table: is missing: the table of routes for these packets`},
	{"machine", "network: {rules: [{priority: 5, from: 10.0.0.1/8, table: 254}]}", `machine.network.rules[0].from: 10.0.0.1/8 has bits set outside of its prefix; did you mean 10.0.0.0/8`},
	{"machine", "network: {rules: [{priority: 5, from: 10.0.0.0/8, to: 'fd00::/8', table: 254}]}", `machine.network.rules[0].to: fd00::/8 is of another address family than 10.0.0.0/8`},
	// Names.
	{"machine", "network: {autoHostname: dhcp}", `machine.network.autoHostname: "dhcp" is not one of auto, stable, off`},
	{"machine", "network: {autoHostname: off}", `machine.network.hostname: is missing: the name of the node, because autoHostname is off`},
	{"machine", "network: {resolver: {dnsOverTLS: [{name: dns.quad9.net}]}}", `machine.network.resolver.dnsOverTLS[0].address: invalid IP can't be the address of a server, such as 9.9.9.9`},
	{"machine", "network: {resolver: {dnsOverTLS: [{address: 0.0.0.0, name: dns.quad9.net}]}}", `machine.network.resolver.dnsOverTLS[0].address: 0.0.0.0 can't be the address of a server, such as 9.9.9.9`},
	{"machine", "network: {resolver: {dnsOverTLS: [{address: 9.9.9.9, name: 9.9.9.9}]}}", `machine.network.resolver.dnsOverTLS[0].name: "9.9.9.9" is not the name of the server's certificate, such as dns.quad9.net`},
	{"machine", "network: {searchDomains: [example.org, a_b]}", `machine.network.searchDomains[1]: "a_b" is not a DNS name, such as example.org`},
	{"machine", "network: {extraHostEntries: [{aliases: [a]}]}", `machine.network.extraHostEntries[0].ip: is missing: the address of the names in aliases`},
	{"machine", "network: {extraHostEntries: [{ip: 10.0.0.9}]}", `machine.network.extraHostEntries[0].aliases: is missing: the names of the address, such as [registry.example.org]`},
	{"machine", "network: {extraHostEntries: [{ip: 10.0.0.9, aliases: ['*.example.org']}]}", `machine.network.extraHostEntries[0].aliases[0]: "*.example.org" is not the name of a host, such as registry.example.org`},
	{"machine", "network: {extraHostEntries: [{ip: 10.0.0.9, aliases: [10.0.0.8]}]}", `machine.network.extraHostEntries[0].aliases[0]: "10.0.0.8" is not the name of a host, such as registry.example.org`},
	{"machine", "network: {extraHostEntries: [{ip: 10.0.0.9, aliases: [Localhost]}]}", `machine.network.extraHostEntries[0].aliases[0]: "Localhost" is the name of the node itself, which has lines of its own in /etc/hosts`},
	{"machine", "network: {hostname: one, extraHostEntries: [{ip: 10.0.0.9, aliases: [two, one]}]}", `machine.network.extraHostEntries[0].aliases[1]: "one" is the name of the node itself, which has lines of its own in /etc/hosts`},
	// Mistyped IP addresses.
	{"machine", "time: {servers: [10.0.0.256]}", `machine.time.servers[0]: "10.0.0.256" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
	{"machine", "certSANs: [10.0.0]", `machine.certSANs[0]: "10.0.0" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
	{"machine", "registries: {mirrors: {docker.io: {endpoints: ['https://10.0.0.256:5000']}}}", `machine.registries.mirrors["docker.io"].endpoints[0]: "10.0.0.256" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
	{"machine", "registries: {mirrors: {docker.io: {endpoints: ['https://10.0.0.1.5000']}}}", `machine.registries.mirrors["docker.io"].endpoints[0]: "10.0.0.1.5000" lacks a colon before the port; did you mean 10.0.0.1:5000`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://10.0.0.256:514'}]}", `machine.logging.destinations[0].endpoint: "10.0.0.256" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
	{"machine", "network: {interfaces: [{interface: wg0, cidr: 10.1.0.1/24, wireguard: {privateKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=, peers: [{publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=, endpoint: '10.0.0.256:51820'}]}}]}",
		`machine.network.interfaces[0].wireguard.peers[0].endpoint: "10.0.0.256" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
	// The machine.
	{"machine", "time: {servers: ['a b']}", `machine.time.servers[0]: "a b" is neither a DNS name nor an IP address`},
	{"machine", "install: {disk: sda}", `machine.install.disk: "sda" is not a device below /dev, such as /dev/sda`},
	{"machine", "install: {extraKernelArgs: ['two args']}", `machine.install.extraKernelArgs[0]: "two args" is not one kernel argument of printable characters, without blanks and quotes, such as console=ttyS1`},
	{"machine", "install: {extraKernelArgs: [garboard.slot=B]}", `machine.install.extraKernelArgs[0]: garboard.slot is set by the boot loader`},
	{"machine", "install: {keys: [abc]}", `machine.install.keys[0]: parse public key: no PUBLIC KEY block: must be the line of base64 in a file of 'gbctl gen release-key', NAME.pub`},
	{"machine", "install: {diskSelector: {size: 100GB}}", `machine.install.diskSelector.size: must begin with a comparison: >=, <=, ==, >, <`},
	{"machine", "install: {diskSelector: {size: '>= much'}}", `machine.install.diskSelector.size: must have a size after the comparison, such as 100GB or 2TiB`},
	{"machine", "disks: [{device: /dev/vdb, partitions: [{mountpoint: /var/mnt/data}]}]", `machine.disks[0].name: is missing: such as data`},
	{"machine", "disks: [{name: data, partitions: [{mountpoint: /var/mnt/data}]}]", `machine.disks[0].device: is missing: or a diskSelector`},
	{"machine", "disks: [{name: data, device: vdb, partitions: [{mountpoint: /var/mnt/data}]}]", `machine.disks[0].device: "vdb" is not a device below /dev, such as /dev/sda`},
	{"machine", "disks: [{name: data, device: /dev/vdb}]", `machine.disks[0].partitions: is missing: such as [{mountpoint: /var/mnt/data}]`},
	{"machine", "disks: [{name: data, device: /dev/vdb, wipe: true, partitions: [{mountpoint: /var/mnt/data}]}]", `machine.disks[0].wipe: needs a disk that is named for good: a device in /dev/disk/by-id, or a diskSelector with serial or wwid, without an asterisk. Other names can be those of another disk after the next boot`},
	{"machine", "disks: [{name: data, diskSelector: {serial: '*'}, wipe: true, partitions: [{mountpoint: /var/mnt/data}]}]", `machine.disks[0].wipe: needs a disk that is named for good: a device in /dev/disk/by-id, or a diskSelector with serial or wwid, without an asterisk. Other names can be those of another disk after the next boot`},
	{"machine", "disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/lib}]}]", `machine.disks[0].partitions[0].mountpoint: "/var/lib" is not /var/mnt/NAME, with a NAME of at most 32 of the characters a-z, 0-9 and -`},
	{"machine", "disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/a}, {mountpoint: /var/mnt/b}]}]", `machine.disks[0].partitions[0].size: is missing: only the last partition can have the rest of the disk`},
	{"machine", "disks: [{name: a, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/a}]}, {name: b, device: /dev/vdc, partitions: [{mountpoint: /var/mnt/a}]}]", `machine.disks[1].partitions[0].mountpoint: another partition is mounted there, too`},
	{"machine", "disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/a, size: 1MiB}]}]", `machine.disks[0].partitions[0].size: is less than 320 MiB`},
	{"machine", "disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/a, size: much}]}]", `machine.disks[0].partitions[0].size: is not a size, such as 100GB or 2TiB`},
	{"machine", "disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/a, filesystem: btrfs}]}]", `machine.disks[0].partitions[0].filesystem: "btrfs" is not one of xfs, ext4`},
	{"machine", "install: {diskSelector: {type: floppy}}", `machine.install.diskSelector.type: "floppy" is not one of nvme, ssd, hdd`},
	{"machine", "install: {image: 'installer'}", `machine.install.image: "installer" lacks a tag or a digest`},
	{"machine", "install: {image: 'Not an image'}", `machine.install.image: "Not an image" is not an image reference, such as registry.k8s.io/pause:3.10.1`},
	{"machine", "certSANs: ['https://x']", `machine.certSANs[0]: "https://x" is neither a DNS name nor an IP address`},
	{"machine", "files: [{content: x}]", `machine.files[0].path: is missing`},
	{"machine", "files: [{path: etc/x}]", `machine.files[0].path: "etc/x" is not an absolute path`},
	{"machine", "files: [{path: /var/../etc/x}]", `machine.files[0].path: "/var/../etc/x" is not a clean path; did you mean /etc/x`},
	{"machine", "files: [{path: /etc/a}, {path: /etc/a, op: append}]", `machine.files[1].path: "/etc/a" is also written by an earlier entry; only entries with op append can share a path`},
	{"machine", "files: [{path: /usr/bin/x}]", `machine.files[0].path: files can be written only in /etc, /run, /var; everything else is read-only`},
	{"machine", "files: [{path: /etc/hosts}]", `machine.files[0].path: /etc/hosts can't be replaced: it is made from machine.network; further lines belong into machine.network.extraHostEntries`},
	{"machine", "files: [{path: /etc/a}, {path: /etc/a/b}]", `machine.files[1].path: conflicts with /etc/a of an earlier entry: one of them would have to be a directory`},
	{"machine", "sysctls: {net.core.somaxconn: '1', net/core/somaxconn: '2'}", `machine.sysctls["net/core/somaxconn"]: is the same parameter as net.core.somaxconn`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, ethernet: {wakeOnLan: [magik]}}]}", `machine.network.interfaces[0].ethernet.wakeOnLan[0]: "magik" is not one of arp, broadcast, magic, multicast, off, phy, unicast; did you mean magic`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, ethernet: {wakeOnLan: [magic, off]}}]}", `machine.network.interfaces[0].ethernet.wakeOnLan[1]: off contradicts the other events`},
	{"machine", "network: {interfaces: [{interface: d0, cidr: 10.7.0.1/32, dummy: true, ethernet: {rings: {rx: 7}}}]}", `machine.network.interfaces[0].ethernet: is for cards, and "d0" is none`},
	// Links on top of each other.
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [eth0]}}, {interface: eth0, dhcp: true}]}", `machine.network.interfaces[1].interface: "eth0" is a member of br0: addresses, DHCP, routes and VLANs belong to the bridge`},
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [eth0]}}, {interface: bond0, bond: {interfaces: [eth0]}}]}", `machine.network.interfaces[1].bond.interfaces[0]: "eth0" is already a member of br0`},
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [eth0]}}, {interface: blue, vrf: {table: 1000, interfaces: [eth0]}}]}", `machine.network.interfaces[1].vrf.interfaces[0]: "eth0" is already a member of br0`},
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [eth0]}, dummy: true}]}", `machine.network.interfaces[0]: br0 can't be a bridge and a dummy at once; give each a name of its own`},
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [bond0]}}, {interface: bond0, bond: {interfaces: [br0.5]}}, {interface: br0, vlans: [{vlanId: 5}]}]}",
		`machine.network.interfaces[0].bridge.interfaces[0]: "bond0" is on top of itself, or of more than 8 links: Linux allows neither`},
	{"machine", "network: {interfaces: [{interface: br0, bridge: {interfaces: [eth0.5]}}]}", `machine.network.interfaces[0].bridge.interfaces[0]: nothing in this configuration makes "eth0.5": add vlans: [{vlanId: 5}] to interface: eth0`},
	{"machine", "network: {interfaces: [{interface: m0, dhcp: true, macvlan: {}}]}", `machine.network.interfaces[0].macvlan.interface: is missing`},
	{"machine", "network: {interfaces: [{interface: m0, dhcp: true, macvlan: {interface: eth0, mode: brigde}}]}", `machine.network.interfaces[0].macvlan.mode: "brigde" is not one of bridge, private, vepa, passthru; did you mean bridge`},
	{"machine", "network: {interfaces: [{interface: m0, dhcp: true, mtu: 9000, macvlan: {interface: eth0}}, {interface: eth0, mtu: 1500}]}", `machine.network.interfaces[0].mtu: 9000 is larger than 1500, the MTU of eth0: Linux refuses that; raise that of eth0`},
	{"machine", "network: {interfaces: [{interface: m0, dhcp: true, macvlan: {interface: eth0}}, {interface: br0, bridge: {interfaces: [eth0]}}]}", `machine.network.interfaces[0].macvlan.interface: "eth0" is a member of br0: name that instead`},
	{"machine", "network: {interfaces: [{interface: eth0, mtu: 1400, vlans: [{vlanId: 5, mtu: 1500}, {vlanId: 6, mtu: 1400}]}]}", `machine.network.interfaces[0].vlans[0].mtu: 1500 is larger than 1400, the MTU of eth0: Linux refuses that; raise that of eth0`},
	{"machine", "network: {interfaces: [{interface: bond0, mtu: 9000, bond: {mode: active-backup, interfaces: [eth0, eth1]}}, {interface: eth1, mtu: 1500}]}", `machine.network.interfaces[0].mtu: 9000 is larger than 1500, the MTU of its port eth1: packets would be lost there; raise that of eth1`},
	{"machine", "network: {interfaces: [{interface: br0, mtu: 9000, bridge: {interfaces: [eth0]}}, {interface: eth0, mtu: 1500}]}", `machine.network.interfaces[0].mtu: 9000 is larger than 1500, the MTU of its port eth0: packets would be lost there; raise that of eth0`},
	{"machine", "network: {interfaces: [{interface: eth0, dhcp: true, vlans: [{vlanId: 5, protocol: 802.1x}]}]}", `machine.network.interfaces[0].vlans[0].protocol: "802.1x" is not one of 802.1q, 802.1ad; did you mean 802.1q`},
	{"machine", "network: {interfaces: [{interface: blue, vrf: {interfaces: [eth1]}}]}", `machine.network.interfaces[0].vrf.table: is missing`},
	{"machine", "network: {interfaces: [{interface: blue, vrf: {table: 254}}]}", `machine.network.interfaces[0].vrf.table: 254 is a table of the kernel itself; choose another one, such as 1000`},
	{"machine", "network: {interfaces: [{interface: v0, veth: {}}]}", `machine.network.interfaces[0].veth.peer: is missing`},
	{"machine", "network: {interfaces: [{interface: v0, veth: {peer: v0}}]}", `machine.network.interfaces[0].interface: "v0" is a veth here, and the other end of a veth, too; choose another name`},
	{"machine", "network: {interfaces: [{interface: d0, dummy: true, driver: igb}]}", `machine.network.interfaces[0]: driver igb selects a card, and d0 is none: the node makes it`},
	{"machine", "network: {interfaces: [{interface: bond0, bond: {interfaces: [eth0]}}, {interface: eth0, dhcp: true}]}", `machine.network.interfaces[1].interface: "eth0" is a member of bond0: addresses, DHCP, routes and VLANs belong to the bond`},
	{"machine", "env: {a b: c}", `machine.env["a b"]: is not the name of an environment variable`},
	{"machine", "sysctls: {../etc: 1}", `machine.sysctls["../etc"]: is not the name of a kernel parameter, such as vm.max_map_count`},
	{"machine", "kubelet: {nodeTaints: {a: NoSchedul}}", `machine.kubelet.nodeTaints.a: must end in an effect of Kubernetes: NoSchedule, PreferNoSchedule, NoExecute; did you mean NoSchedule`},
	{"machine", "kubelet: {nodeTaints: {a: 'b c:NoSchedule'}}", `machine.kubelet.nodeTaints.a: the value before the colon must be of letters, digits, dashes, dots and underscores, 63 at most`},
	{"machine", "kubelet: {nodeTaints: {a b: NoSchedule}}", `machine.kubelet.nodeTaints["a b"]: is not the name of a taint`},
	{"machine", "kubelet: {persist: [cni, volumePlugin]}", `machine.kubelet.persist[1]: "volumePlugin" is not one of cni, volumePlugins; did you mean volumePlugins`},
	{"machine", "kubelet: {extraMounts: [{hostPath: /a, mountPath: /b}, {hostPath: /c, mountPath: /b}]}", `machine.kubelet.extraMounts[1].mountPath: "/b" is taken by an earlier entry`},
	{"machine", "registries: {mirrors: {'https://docker.io/': {endpoints: [http://a]}}}", `machine.registries.mirrors["https://docker.io/"]: is a host, not a URL; did you mean "docker.io"`},
	{"machine", "registries: {mirrors: {a/b: {endpoints: [http://a]}}}", `machine.registries.mirrors["a/b"]: is not the host of a registry, such as docker.io, or '*'`},
	{"machine", "registries: {mirrors: {docker.io: {}}}", `machine.registries.mirrors["docker.io"].endpoints: is missing: a mirror without endpoints has no images`},
	{"machine", "registries: {mirrors: {docker.io: {endpoints: ['https://a/v2/hub', 'https://b/'], overridePath: true}}}", `machine.registries.mirrors["docker.io"].endpoints[1]: has no path, which overridePath needs: append /v2, or leave overridePath out`},
	{"machine", "registries: {mirrors: {docker.io: {endpoints: [10.5.0.1]}}}", `machine.registries.mirrors["docker.io"].endpoints[0]: not an absolute URL such as https://host:port/path`},
	{"machine", "registries: {mirrors: {docker.io: {endpoints: [ftp://a]}}}", `machine.registries.mirrors["docker.io"].endpoints[0]: must be http or https, not "ftp"`},
	{"machine", "registries: {config: {a: {auth: {}}}}", `machine.registries.config.a.auth: needs exactly one of username with password, auth, and identityToken`},
	{"machine", "registries: {config: {a: {auth: {username: x}}}}", `machine.registries.config.a.auth: username and password belong together`},
	{"machine", "registries: {config: {'*': {auth: {username: x, password: y}}}}", `machine.registries.config["*"].auth: would give the credentials to every host: name the hosts that they are for, such as registry.example.org:5000`},
	{"machine", "sysfs: {../etc/a: b}", `machine.sysfs["../etc/a"]: is not a path below /sys, such as block/sda/queue/scheduler`},
	{"machine", "sysfs: {/sys/a/b: b}", `machine.sysfs["/sys/a/b"]: is not a path below /sys, such as block/sda/queue/scheduler`},
	{"machine", `udev: {rules: ['KERNEL=="sda"']}`, `machine.udev.rules[0]: does nothing: a rule has ATTR{…}=, MODE=, OWNER=, GROUP= or SYMLINK+=`},
	{"machine", `udev: {rules: ['KERNEL=="sda" MODE="0660"']}`, `machine.udev.rules[0]: can't be read from "KERNEL==\"sda\" MODE=\"0660\"" on: a rule is KEY=="value" and KEY="value", with commas between them`},
	{"machine", `udev: {rules: ['KERNEL=="sda", RUN+="/bin/true"']}`, `machine.udev.rules[0]: RUN: a node has no programs for rules. A setting below /sys is ATTR{…}=`},
	{"machine", `udev: {rules: ['GOTO="end"']}`, `machine.udev.rules[0]: GOTO isn't a key that a node has; it has ACTION, KERNEL, SUBSYSTEM, DRIVER, ENV{…}, ATTR{…}, KERNELS, SUBSYSTEMS, DRIVERS, ATTRS{…}, MODE, OWNER, GROUP and SYMLINK`},
	{"machine", `udev: {rules: ['MODE=="0660"']}`, `machine.udev.rules[0]: MODE ==: the operator must be one of =`},
	{"machine", `udev: {rules: ['GROUP="disk"']}`, `machine.udev.rules[0]: GROUP: "disk" is not a number; a node has no names of users and groups`},
	{"machine", `udev: {rules: ['MODE="rw"']}`, `machine.udev.rules[0]: MODE: "rw" is not octal permissions, such as 0660`},
	{"machine", `udev: {rules: ['SYMLINK+="../etc/passwd"']}`, `machine.udev.rules[0]: SYMLINK: "../etc/passwd" is not a path below /dev`},
	{"machine", `udev: {rules: ['ATTR{../../kernel}="1"']}`, `machine.udev.rules[0]: ATTR{}: "../../kernel" is not a path below the device`},
	{"machine", "kernel: {modules: [{}]}", `machine.kernel.modules[0].name: is missing: such as nvme_tcp`},
	{"machine", "kernel: {modules: [{name: a/b}]}", `machine.kernel.modules[0].name: is not the name of a kernel module, such as nvme_tcp`},
	{"machine", "kernel: {modules: [{name: brd, parameters: ['rd_nr 2']}]}", `machine.kernel.modules[0].parameters[0]: must be NAME=VALUE, or NAME alone, without blanks`},
	{"machine", "images: {verify: [{prefix: a}]}", `machine.images.verify[0]: needs keys, or an authority with an identity`},
	{"machine", "images: {verify: [{keys: [LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0KTUZrd0V3WUhLb1pJemowQ0FRWUlLb1pJemowREFRY0RRZ0FFb1J4cEs4TFd2WldkK3M4VFR3d2ViT1BvNHkxMwpWaXptclN5ZzhQR2lUKzB4aEZaa0dFSk5MakVqWVFrUjh1R0NBM3ZMcWRrdFF5MXFyUnpzaUFXcVl3PT0KLS0tLS1FTkQgUFVCTElDIEtFWS0tLS0tCg==]}]}", `machine.images.verify[0].prefix: is missing: a rule needs the images that it is for: '*' is every image`},
	{"machine", "images: {verify: [{prefix: a/*, keys: [LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0KTUZrd0V3WUhLb1pJemowQ0FRWUlLb1pJemowREFRY0RRZ0FFb1J4cEs4TFd2WldkK3M4VFR3d2ViT1BvNHkxMwpWaXptclN5ZzhQR2lUKzB4aEZaa0dFSk5MakVqWVFrUjh1R0NBM3ZMcWRrdFF5MXFyUnpzaUFXcVl3PT0KLS0tLS1FTkQgUFVCTElDIEtFWS0tLS0tCg==]}]}", `machine.images.verify[0].prefix: is the beginning of names, without an asterisk; '*' alone is every image`},
	{"machine", "images: {verify: [{prefix: a, keys: [LS0tLS1CRUdJTiBBLS0tLS0KLS0tLS1FTkQgQS0tLS0tCg==]}]}", `machine.images.verify[0].keys[0]: parse public key: no PUBLIC KEY block`},
	{"machine", "images: {verify: [{prefix: a, keys: [LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0KTUZrd0V3WUhLb1pJemowQ0FRWUlLb1pJemowREFRY0RRZ0FFb1J4cEs4TFd2WldkK3M4VFR3d2ViT1BvNHkxMwpWaXptclN5ZzhQR2lUKzB4aEZaa0dFSk5MakVqWVFrUjh1R0NBM3ZMcWRrdFF5MXFyUnpzaUFXcVl3PT0KLS0tLS1FTkQgUFVCTElDIEtFWS0tLS0tCg==], identity: x}]}", `machine.images.verify[0]: authority and identity belong together`},
	{"machine", "images: {verify: [{prefix: a, authority: LS0tLS1CRUdJTiBBLS0tLS0KLS0tLS1FTkQgQS0tLS0tCg==, identity: x}]}", `machine.images.verify[0].authority: parse certificate: no CERTIFICATE block`},
	{"machine", "systemDiskEncryption: {state: {}}", `machine.systemDiskEncryption.state.keys: is missing: an encrypted partition needs at least one`},
	{"machine", "systemDiskEncryption: {state: {keys: [{nodeID: {}}]}}", `machine.systemDiskEncryption.state.keys[0].slot: is missing: every key has its slot, 0 to 31`},
	{"machine", "systemDiskEncryption: {state: {keys: [{slot: 1}]}}", `machine.systemDiskEncryption.state.keys[0]: needs exactly one of nodeID, static, kms and tpm`},
	{"machine", "systemDiskEncryption: {state: {keys: [{tpm: {}, slot: 1, nodeID: {}}]}}", `machine.systemDiskEncryption.state.keys[0]: needs exactly one of nodeID, static, kms and tpm`},
	{"machine", "systemDiskEncryption: {ephemeral: {keys: [{recovery: {}, slot: 1, nodeID: {}}]}}", `machine.systemDiskEncryption.ephemeral.keys[0].recovery: unknown key; a machine gets its recovery key by gbctl recovery-key add`},
	{"machine", "systemDiskEncryption: {state: {keys: [{slot: 1, kms: {endpoint: https://kms, ca: LS0=}}]}}", `machine.systemDiskEncryption.state.keys[0].kms.ca: no PEM inside the base64`},
	{"machine", "systemDiskEncryption: {state: {keys: [{slot: 1, kms: {ca: " + crt + "}}]}}", `machine.systemDiskEncryption.state.keys[0].kms.endpoint: is missing: such as https://10.0.0.2:8443`},
	{"machine", "systemDiskEncryption: {state: {keys: [{slot: 1, kms: {endpoint: https://kms}}]}}", `machine.systemDiskEncryption.state.keys[0].kms.ca: is missing`},
	{"machine", "systemDiskEncryption: {ephemeral: {keys: [{slot: 1, kms: {endpoint: http://kms, ca: " + crt + "}}]}}", `machine.systemDiskEncryption.ephemeral.keys[0].kms.endpoint: must be https://HOST:PORT, and nothing more`},
	{"machine", "systemDiskEncryption: {ephemeral: {keys: [{slot: 1, kms: {endpoint: https://kms/v1, ca: " + crt + "}}]}}", `machine.systemDiskEncryption.ephemeral.keys[0].kms.endpoint: must be https://HOST:PORT, and nothing more`},
	{"machine", "systemDiskEncryption: {state: {keys: [{static: {passphrase: " + strings.Repeat("x", 513) + "}, slot: 1}]}}", `machine.systemDiskEncryption.state.keys[0].static.passphrase: is longer than 512 characters`},
	{"machine", "systemDiskEncryption: {state: {keys: [{nodeID: {}, slot: 32}]}}", `machine.systemDiskEncryption.state.keys[0].slot: 32 is out of range (0 to 31)`},
	{"machine", "systemDiskEncryption: {state: {keys: [{nodeID: {}, slot: 1}, {static: {passphrase: x}, slot: 1}]}}", `machine.systemDiskEncryption.state.keys[1].slot: 1 is already taken by another key`},
	{"machine", "logging: {destinations: [{format: json_lines}]}", `machine.logging.destinations[0].endpoint: is missing: such as tcp://host:port`},
	{"machine", "logging: {destinations: [{endpoint: 'logs:514'}]}", `machine.logging.destinations[0].endpoint: not an absolute URL such as https://host:port/path`},
	{"machine", "logging: {destinations: [{endpoint: 'tcps://logs:514'}]}", `machine.logging.destinations[0].endpoint: must be tcp, udp, tls, http or https, not "tcps"; did you mean tcp`},
	{"machine", "logging: {destinations: [{endpoint: 'udp://logs'}]}", `machine.logging.destinations[0].endpoint: lacks the port; did you mean udp://logs:514`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://logs:99999'}]}", `machine.logging.destinations[0].endpoint: "99999" is not a port (1 to 65535)`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://me:pass@logs:514/x'}]}", `machine.logging.destinations[0].endpoint: must be a scheme, a host and a port only; did you mean tcp://logs:514`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://a_b:514'}]}", `machine.logging.destinations[0].endpoint: "a_b" is neither a DNS name nor an IP address`},
	{"machine", "logging: {destinations: [{endpoint: 'https://logs/x', format: rfc5424}]}", `machine.logging.destinations[0].format: rfc5424 isn't sent over HTTP; use json_lines, or an endpoint with tcp, tls or udp`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://logs:514', format: json}]}", `machine.logging.destinations[0].format: "json" is not one of json_lines, rfc5424`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://logs:514'}, {endpoint: 'tcp://logs:514', format: rfc5424}]}", `machine.logging.destinations[1].endpoint: is also the endpoint of an earlier entry`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://logs:514', extraTags: {host: a}}]}", `machine.logging.destinations[0].extraTags.host: is a field that each line has; choose another name`},
	{"machine", "logging: {destinations: [{endpoint: 'tcp://logs:514', extraTags: {'a b': a}}]}", `machine.logging.destinations[0].extraTags["a b"]: must be of letters, digits, dashes, dots and underscores, 32 at most`},
	{"machine", `logging: {destinations: [{endpoint: 'tcp://logs:514', extraTags: {a: "x\ny"}}]}`, `machine.logging.destinations[0].extraTags.a: the value must be of printable characters, 256 bytes at most`},
	{"machine", "console: {disabled: [log, ssh]}", `machine.console.disabled[1]: "ssh" is not one of status, log, network, unlock, wipe, reboot, shutdown`},
	{"machine", "metrics: {address: 9100}", `machine.metrics.address: "9100" is not host:port or :port`},
	{"machine", "metrics: {address: ':443'}", `machine.metrics.address: port 443 is for programs with privileges; choose a port from 1024 on`},
	{"machine", "metrics: {address: ':10250'}", `machine.metrics.address: another program of the node listens on port 10250; choose another port`},
	{"machine", "metrics: {address: 'node-1:9100'}", `machine.metrics.address: "node-1" is not an IP address of the node`},
	// The cluster.
	{"cluster", "extraManifests: ['file:///x']", `cluster.extraManifests[0]: not an absolute URL such as https://host:port/path`},
	{"cluster", "extraManifests: ['https://example.org/a.yaml#part']", `cluster.extraManifests[0]: #part isn't #sha256= and the 64 hexadecimal digits of the document's sum`},
	{"cluster", "extraManifests: ['https://example.org/a.yaml#sha256=abc']", `cluster.extraManifests[0]: #sha256=abc isn't #sha256= and the 64 hexadecimal digits of the document's sum`},
	{"cluster", "inlineManifests: [{contents: x}]", `cluster.inlineManifests[0].name: is missing`},
	{"cluster", "inlineManifests: [{name: a, contents: x}, {name: a, contents: y}]", `cluster.inlineManifests[1].name: "a" names a second manifest`},
	{"cluster", "apiServer: {auditPolicy: x}", `cluster.apiServer.auditPolicy: must be a mapping, not text`},
	{"cluster", "apiServer: {auditPolicy: {kind: Policy, rules: [{level: None}]}}", `cluster.apiServer.auditPolicy.apiVersion: is missing: audit.k8s.io/v1`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1beta1, kind: Policy, rules: [{level: None}]}}", `cluster.apiServer.auditPolicy.apiVersion: must be audit.k8s.io/v1, not "audit.k8s.io/v1beta1"`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Pod, rules: [{level: None}]}}", `cluster.apiServer.auditPolicy.kind: must be Policy, not "Pod"`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: []}}", `cluster.apiServer.auditPolicy.rules: is missing: the API server needs at least one; {level: None} logs nothing`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{verbs: [get]}]}}", `cluster.apiServer.auditPolicy.rules[0].level: is missing: None, Metadata, Request, RequestResponse`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{level: Meta}]}}", `cluster.apiServer.auditPolicy.rules[0].level: "Meta" is not one of None, Metadata, Request, RequestResponse`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{level: None, verb: [get]}]}}", `cluster.apiServer.auditPolicy.rules[0].verb: unknown key; did you mean verbs`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, omitStages: [Received], rules: [{level: None}]}}", `cluster.apiServer.auditPolicy.omitStages[0]: "Received" is not one of RequestReceived, ResponseStarted, ResponseComplete, Panic`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{level: None, nonResourceURLs: [/x], namespaces: [a]}]}}", `cluster.apiServer.auditPolicy.rules[0].nonResourceURLs: a rule is for resources or for URLs, not for both`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{level: None, nonResourceURLs: [/*/x]}]}}", `cluster.apiServer.auditPolicy.rules[0].nonResourceURLs[0]: "/*/x" is neither * nor a path that starts with a slash and has * only at its end`},
	{"cluster", "apiServer: {auditPolicy: {apiVersion: audit.k8s.io/v1, kind: Policy, rules: [{level: None, resources: [{resourceNames: [a]}]}]}}", `cluster.apiServer.auditPolicy.rules[0].resources[0].resourceNames: needs resources: names alone select nothing`},
	{"cluster", "apiServer: {admissionControl: [{configuration: {a: b}}]}", `cluster.apiServer.admissionControl[0].name: is missing: the name of an admission plugin, such as PodSecurity`},
	{"cluster", "apiServer: {admissionControl: [{name: A, configuration: {a: b}}, {name: A, configuration: {a: b}}]}", `cluster.apiServer.admissionControl[1].name: "A" is configured twice`},
	{"cluster", "apiServer: {admissionControl: [{name: A}]}", `cluster.apiServer.admissionControl[0].configuration: is missing`},
	{"cluster", "apiServer: {admissionControl: [{name: A, configuration: {a: .inf}}]}", `cluster.apiServer.admissionControl[0].configuration: json: unsupported value: +Inf`},
	{"cluster", "apiServer: {admissionControl: [{name: A, configuration: {a: 1, a: 2}}]}", `cluster.apiServer.admissionControl[0].configuration.a: is given twice, first on line N`},
	{"cluster", "apiServer: {admissionControl: [{name: A, configuration: {a: !x 1}}]}", `cluster.apiServer.admissionControl[0].configuration.a: the tag "!x" isn't supported`},
	{"cluster", "inlineManifests: [{name: a}]", `cluster.inlineManifests[0].contents: is missing`},
}

var (
	lineNumber = regexp.MustCompile(`\bline \d+`)
	location   = regexp.MustCompile(`^test\.yaml:\d+:\d+: `)
)

func TestOneProblem(t *testing.T) {
	doc := document(t, ControlPlane)
	for _, tt := range oneProblem {
		t.Run(tt.lines, func(t *testing.T) {
			// A section that Generate writes is replaced by the test's.
			key, _, _ := strings.Cut(tt.lines, ":")
			base := regexp.MustCompile(`(?m)^  `+regexp.QuoteMeta(key)+`:.*\n(    .*\n)*`).ReplaceAllString(doc, "")
			_, _, problems := load(t, with(base, tt.section, tt.lines))
			if len(problems) != 1 || !location.MatchString(problems[0]) {
				t.Fatalf("problems:\n%s", strings.Join(problems, "\n"))
			}
			got := lineNumber.ReplaceAllString(location.ReplaceAllString(problems[0], ""), "line N")
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// replaced are documents in which something is replaced.
func TestReplaced(t *testing.T) {
	s := testSecrets()
	for _, tt := range []struct {
		old, new string
		typ      MachineType
		want     string
	}{
		{"version: v1alpha1", "version: v2", Init, `version: "v2" is not known; this release reads v1alpha1`},
		{"version: v1alpha1\n", "", Init, `version: is missing: this release reads v1alpha1`},
		{"type: init\n", "", Init, `machine.type: is missing: init, controlplane or worker`},
		{"type: init", "type: inti", Init, `machine.type: "inti" is not one of init, controlplane, worker, join; did you mean init`},
		{string(s.MachineToken), "abc", Init, `machine.token: must be six characters, a dot and sixteen characters, all of a-z and 0-9`},
		{"https://10.5.0.2:6443", "http://10.5.0.2:6443", Init, `cluster.controlPlane.endpoint: must be https, not "http"`},
		{"https://10.5.0.2:6443", "https://10.5.0.256:6443", Init, `cluster.controlPlane.endpoint: "10.5.0.256" is neither a DNS name nor an IP address: an IPv4 address has four numbers up to 255`},
		{"https://10.5.0.2:6443", "https://10.5.0.2.6443", Init, `cluster.controlPlane.endpoint: "10.5.0.2.6443" lacks a colon before the port; did you mean 10.5.0.2:6443`},
		{"https://10.5.0.2:6443", "https://10.5.0.2", Init, `cluster.controlPlane.endpoint: lacks the port; did you mean https://10.5.0.2:6443`},
		{"https://10.5.0.2:6443", "https://10.5.0.2:6443/api", Init, `cluster.controlPlane.endpoint: must be a scheme, a host and a port only; did you mean https://10.5.0.2:6443`},
		{"https://10.5.0.2:6443", "10.5.0.2:6443", Init, `cluster.controlPlane.endpoint: not a URL: first path segment in URL cannot contain colon`},
		{encodePEM(s.KubernetesCA.Key), encodePEM(s.EtcdCA.Key), Init, `cluster.ca: private key doesn't belong to certificate "CN=kubernetes,O=kubernetes"`},
		{"    key: " + encodePEM(s.KubernetesCA.Key) + "\n", "", Init, `cluster.ca.key: is missing: a control plane issues certificates`},
		{"  # Signs service account tokens.\n  serviceAccount:\n    key: " + encodePEM(s.ServiceAccount) + "\n", "", Init, `cluster.serviceAccount.key: is missing: a control plane signs service account tokens`},
		{encodePEM(s.ServiceAccount), encodePEM(s.EtcdCA.Crt), Init, `cluster.serviceAccount.key: parse private key: no PRIVATE KEY block`},
		{string(s.ClusterSecret), "abc", Init, `cluster.secret: must be base64 of 32 bytes`},
		{"type: worker", "type: worker\n  network: {interfaces: [{interface: eth0, vip: {ip: 10.0.0.1}}]}", Worker, `machine.network.interfaces[0].vip: is for control planes; this is a worker`},
		{"type: worker", "type: worker\n  kubelet: {extraArgs: {--v: 2}}\n  x: {", Worker, `SYNTAX`},
		{"kubelet:\n", "kubelet:\n    extraArgs: {--v: 2}\n", Worker, `machine.kubelet.extraArgs.--v: is written without dashes; did you mean v`},
		{"kubelet:\n", "kubelet:\n    extraArgs: {v=2: x}\n", Worker, `machine.kubelet.extraArgs["v=2"]: is not the name of a flag`},
		{"kubelet:\n", "kubelet:\n    nodeLabels: {node-role.kubernetes.io/worker: x}\n", Worker, `machine.kubelet.nodeLabels["node-role.kubernetes.io/worker"]: a kubelet may not set this label on itself; did you mean node.kubernetes.io/worker`},
		{"kubelet:\n", "kubelet:\n    nodeLabels: {a: 'b c'}\n", Worker, `machine.kubelet.nodeLabels.a: "b c" can't be the value of a label`},
		{"kubelet:\n", "kubelet:\n    nodeLabels: {a b: c}\n", Worker, `machine.kubelet.nodeLabels["a b"]: is not the name of a label`},
		{"  network:\n", "  network:\n    podSubnets: [10.96.0.0/16]\n", Init, `cluster.network.podSubnets[0]: 10.96.0.0/16 overlaps the service subnet 10.96.0.0/12`},
		{"  network:\n", "  network:\n    podSubnets: [10.244.0.1/16]\n", Init, `cluster.network.podSubnets[0]: 10.244.0.1/16 has bits set outside of its prefix; did you mean 10.244.0.0/16`},
		{"  network:\n", "  network:\n    podSubnets: [10.244.0.0/24]\n", Init, `cluster.network.podSubnets[0]: 10.244.0.0/24 is too small for the pods of two nodes; use a prefix length of 23 or less`},
		{"  network:\n", "  network:\n    podSubnets: [10.1.0.0/16, 10.2.0.0/16]\n", Init, `cluster.network.podSubnets: holds more than one subnet of an address family`},
		{"  network:\n", "  network:\n    serviceSubnets: [11.0.0.0/8]\n", Init, `cluster.network.serviceSubnets[0]: 11.0.0.0/8 is larger than kube-apiserver allows; use a prefix length of 12 or more`},
		{"  network:\n", "  network:\n    podSubnets: [10.244.0.0/16, 'fd00:10:244::/56']\n    serviceSubnets: ['fd00:10:96::/112', 10.96.0.0/12]\n", Init,
			`cluster.network.serviceSubnets[0]: fd00:10:96::/112 is of another address family than 10.244.0.0/16, the first of podSubnets; put the same family first in both`},
		{"  network:\n", "  network:\n    serviceSubnets: [10.96.0.0/12, 'fd00:10:96::/112']\n", Init,
			`cluster.network.serviceSubnets[1]: fd00:10:96::/112 has no subnet of its address family in podSubnets: no pod would have an address for these Services`},
		{"  network:\n", "  network:\n    podSubnets: [10.244.0.0/16, 'fd00:10::/32']\n", Init,
			`cluster.network.podSubnets[1]: fd00:10::/32 is larger than kube-controller-manager allows; use a prefix length of 48 or more`},
		{"  network:\n", "  network:\n    dnsDomain: a_b\n", Init, `cluster.network.dnsDomain: "a_b" is not a DNS name`},
		{"    cni:\n", "    cni:\n      urls: [http://a]\n", Init, `cluster.network.cni.urls: contradicts name flannel; did you mean name custom`},
		{"    cni:\n", "    cni:\n      name: custom\n", Init, `cluster.network.cni.urls: is missing: a custom CNI needs at least one`},
		{"controlPlane:\n", "controlPlane:\n    localAPIServerPort: 70000\n", Init, `cluster.controlPlane.localAPIServerPort: 70000 is not a port (1 to 65535)`},
		{"  apiServer:\n", "  apiServer:\n    extraVolumes: [{hostPath: a, mountPath: /b}]\n", Init, `cluster.apiServer.extraVolumes[0].hostPath: "a" is not an absolute path`},
	} {
		t.Run(tt.want, func(t *testing.T) {
			doc := document(t, tt.typ)
			if strings.Count(doc, tt.old) != 1 {
				t.Fatalf("%q is in the document %d times", tt.old, strings.Count(doc, tt.old))
			}
			_, _, problems := load(t, strings.Replace(doc, tt.old, tt.new, 1))
			if tt.want == "SYNTAX" {
				if len(problems) != 1 || !strings.Contains(problems[0], "not valid YAML: ") {
					t.Error(problems)
				}
				return
			}
			if len(problems) != 1 || location.ReplaceAllString(problems[0], "") != tt.want {
				t.Errorf("problems:\n%s", strings.Join(problems, "\n"))
			}
		})
	}
}

// What weakens the node is accepted, and said.
func TestWeakSettings(t *testing.T) {
	for _, tc := range []struct{ part, setting, want string }{
		{"machine", "registries: {mirrors: {docker.io: {endpoints: ['https://m.example', 'http://m.example:5000']}}}", `machine.registries.mirrors["docker.io"].endpoints[1]: images come without TLS`},
		{"machine", "registries: {mirrors: {docker.io: {endpoints: ['https://m.example']}}}", ""},
		{"machine", "registries: {config: {r.example: {tls: {insecureSkipVerify: true}}}}", `machine.registries.config["r.example"].tls.insecureSkipVerify: anybody can answer in the place of r.example`},
		{"machine", "registries: {config: {r.example: {tls: {insecureSkipVerify: false}}}}", ""},
		{"machine", "kubelet: {persist: [volumePlugins]}", "machine.kubelet.persist[0]: what pods leave there stays over a boot, and the node runs it as root"},
		{"machine", "kubelet: {persist: []}", ""},
		{"machine", "logging: {destinations: [{endpoint: 'udp://10.5.0.1:514'}]}", "machine.logging.destinations[0].endpoint: logs go over UDP"},
		{"machine", "logging: {destinations: [{endpoint: 'tls://10.5.0.1:514'}]}", ""},
		{"machine", "install: {extraKernelArgs: [console=ttyS1, 'garboard.config=https://jo:hush@10.0.0.1/w.yaml']}", "machine.install.extraKernelArgs[1]: every pod can read the arguments of the kernel, and this one has credentials in it: garboard.config=https://jo:xxxxx@10.0.0.1/w.yaml"},
		{"machine", "install: {extraKernelArgs: ['garboard.config=https://10.0.0.1/w.yaml?token=hush']}", "machine.install.extraKernelArgs[0]: every pod can read"},
		{"machine", "install: {extraKernelArgs: ['garboard.config=data:;base64,aHVzaA==']}", "machine.install.extraKernelArgs[0]: every pod can read"},
		{"machine", "install: {extraKernelArgs: ['garboard.config=https://10.0.0.1/${serial}.yaml', 'ip=10.0.0.2::10.0.0.1', 'module.sig_enforce=1']}", ""},
		{"machine", "kubelet: {extraArgs: {anonymous-auth: 'true'}}", "machine.kubelet.extraArgs.anonymous-auth: requests without credentials are answered"},
		{"machine", "kubelet: {extraArgs: {anonymous-auth: 'false', tls-min-version: VersionTLS12}}", ""},
		{"machine", "kubelet: {extraArgs: {tls-min-version: VersionTLS11}}", "machine.kubelet.extraArgs.tls-min-version: VersionTLS11 has known weaknesses"},
		{"cluster", "apiServer: {extraArgs: {anonymous-auth: 'true'}}", "cluster.apiServer.extraArgs.anonymous-auth: requests without"},
		{"cluster", "apiServer: {extraArgs: {tls-min-version: VersionTLS10}}", "cluster.apiServer.extraArgs.tls-min-version: VersionTLS10 has"},
		{"cluster", "controllerManager: {extraArgs: {tls-min-version: VersionTLS10}}", "cluster.controllerManager.extraArgs.tls-min-version"},
		{"cluster", "scheduler: {extraArgs: {tls-min-version: VersionTLS10}}", "cluster.scheduler.extraArgs.tls-min-version"},
		{"cluster", "extraManifests: ['https://example.org/a.yaml#sha256=" + strings.Repeat("0aF9", 16) + "']", ""},
	} {
		key, _, _ := strings.Cut(tc.setting, ":")
		_, warnings := accepted(t, with(without(document(t, ControlPlane), tc.part, key), tc.part, tc.setting))
		if tc.want == "" && warnings != "" || !strings.Contains(warnings, tc.want) {
			t.Errorf("%s: %q, want %q", tc.setting, warnings, tc.want)
		}
	}
}

// A worker gets a warning that it gets no additional names.
func TestWorkerNames(t *testing.T) {
	for _, typ := range []MachineType{Worker, ControlPlane} {
		_, warnings := accepted(t, with(document(t, typ), "machine", "certSANs: [node.example.org]"))
		if told := strings.Contains(warnings, "machine.certSANs: for a worker, control planes sign only its host name"); told != (typ == Worker) {
			t.Errorf("%s: %q", typ, warnings)
		}
	}
}

// All problems are reported at once, in the order of the document, with their positions.
func TestAllProblemsAtOnce(t *testing.T) {
	doc := `version: v1alpha1
machine:
  type: join
  tokn: abcdef.0123456789abcdef
  network:
    hostname: [a]
    interfaces:
      - interface: eth0
        cidr: 10.0.0.1
      - mtu: 1
  mystery: 1
cluster:
  controlPlane:
    endpoint: cluster.example.org
persist: maybe
`
	want := `test.yaml:2:1: machine.token: is missing
test.yaml:2:1: machine.ca.crt: is missing
test.yaml:4:3: machine.tokn: unknown key; did you mean token
test.yaml:6:15: machine.network.hostname: must be text, not a list
test.yaml:9:15: machine.network.interfaces[0].cidr: lacks the prefix length; did you mean 10.0.0.1/24
test.yaml:10:9: machine.network.interfaces[1].interface: is missing: or hardwareAddr, driver or busPath, which select a card
test.yaml:10:9: machine.network.interfaces[1].mtu: 1 is out of range (68 to 65535 bytes)
test.yaml:11:3: machine.mystery: unknown key; known here are type, token, ca, acceptedCAs, certSANs, network, time, install, disks, kubelet, registries, images, files, env, sysctls, sysfs, udev, kernel, systemDiskEncryption, logging, metrics, console
test.yaml:12:1: cluster.token: is missing
test.yaml:12:1: cluster.ca.crt: is missing
test.yaml:14:15: cluster.controlPlane.endpoint: not an absolute URL such as https://host:port/path
test.yaml:15:10: persist: must be true or false, not "maybe"`
	_, warnings, problems := load(t, doc)
	if diff := cmp.Diff(want, strings.Join(problems, "\n")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{`test.yaml:3:3: machine.type: "join" is an alias; use "worker"`}, warnings); diff != "" {
		t.Error(diff)
	}
}

func TestNotADocument(t *testing.T) {
	for _, tt := range []struct{ name, doc, want string }{
		{"empty", "", "test.yaml: is empty"},
		{"blank", " \n\n", "test.yaml: is empty"},
		{"comment", "# nothing\n", "test.yaml: is empty"},
		{"zero bytes", "a: b\nc\x00", "test.yaml:2:2: holds a zero byte: this is not a text file"},
		{"text", "hello\n", "test.yaml:1:1: is text, not a mapping that starts with version, machine and cluster"},
		{"list", "- a\n", "test.yaml:1:1: is a list, not a mapping that starts with version, machine and cluster"},
		{"two documents", "a: b\n---\nc: d\n", "test.yaml:2:1: holds more than one YAML document; a configuration is one"},
		{"tabs", "machine:\n\ttype: init\n", "test.yaml:2:1: not valid YAML: found character that cannot start any token; YAML is indented with spaces, not with tabs"},
		{"syntax", "a: b: c\n", "test.yaml:1:1: not valid YAML: mapping values are not allowed in this context"},
		{"large", strings.Repeat("#", MaxSize+1), "test.yaml: has 1048577 bytes, more than the 1048576 that a configuration may have"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, _, problems := load(t, tt.doc)
			if diff := cmp.Diff([]string{tt.want}, problems); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A document that is cut off anywhere either still means the same, or gives
// exactly one problem.
func TestTruncated(t *testing.T) {
	for _, doc := range []string{document(t, Init), full(t)} {
		whole := len(doc)
		for n := 1; n < whole; n += 31 {
			_, _, err := Load("test.yaml", []byte(doc[:n]))
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Fatalf("cut after %d of %d bytes:\n%v", n, whole, err)
			}
		}
	}
	doc := document(t, Init)
	cut := strings.Index(doc, "  token: ") + len("  token: abc")
	_, _, problems := load(t, doc[:cut])
	want := []string{"test.yaml:9:13: ends in the middle of a line, after 290 bytes, so it is probably truncated; " +
		"first consequence: line 2: cluster.controlPlane.endpoint: is missing: the URL of the Kubernetes API"}
	if diff := cmp.Diff(want, problems); diff != "" {
		t.Error(diff)
	}
	// A problem that isn't a consequence of the cut is still reported.
	_, _, problems = load(t, strings.Replace(doc[:cut], "type:", "mtype: x\n  type:", 1))
	if len(problems) != 2 || !strings.Contains(problems[0], "machine.mtype: unknown key; did you mean type") {
		t.Error(problems)
	}
	// A file without a final newline that is wrong elsewhere isn't truncated.
	_, _, problems = load(t, strings.TrimSuffix(with(doc, "machine", "tokn: x"), "\n"))
	if len(problems) != 1 || !strings.HasSuffix(problems[0], "machine.tokn: unknown key; did you mean token") {
		t.Error(problems)
	}
	cut = strings.Index(doc, "cluster:\n")
	_, _, problems = load(t, doc[:cut])
	want = []string{"test.yaml:16:1: ends here without cluster.controlPlane.endpoint, cluster.token, cluster.ca.crt, cluster.aggregatorCA.crt, " +
		"cluster.etcd.ca.crt, cluster.serviceAccount.key: is it truncated?"}
	if diff := cmp.Diff(want, problems); diff != "" {
		t.Error(diff)
	}
}

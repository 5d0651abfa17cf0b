package network

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const (
	platformV1 = `
version: 1
config:
  - type: physical
    name: eth0
    mac_address: "52:54:00:AB:CD:01"
    mtu: 1400
    subnets:
      - {type: static, address: 10.5.0.2, netmask: 255.255.255.0, gateway: 10.5.0.1, dns_nameservers: [10.5.0.9], dns_search: [a.example]}
      - type: static6
        address: fd05::2/64
        gateway: fd05::1
        routes: [{network: fd06::, netmask: "48", gateway: fd05::6, metric: 7}]
  - {type: physical, name: eth1, subnets: [{type: dhcp}, {type: ipv6_slaac}]}
  - {type: nameserver, address: 9.9.9.9, search: [b.example]}
`
	platformV2 = `
network:
  version: 2
  ethernets:
    id0:
      match: {macaddress: "52:54:00:ab:cd:01"}
      set-name: wan
      mtu: 1400
      addresses: [10.5.0.2/24, "fd05::2/64"]
      gateway4: 10.5.0.1
      nameservers: {addresses: [10.5.0.9], search: [a.example]}
      routes: [{to: default, via: "fd05::1"}, {to: 10.6.0.0/16, via: 10.5.0.6, metric: 7, table: 20}, {to: 10.7.0.1, via: 10.5.0.6}]
    eth1: {dhcp4: true, dhcp6: true, accept-ra: false}
`
)

func TestNetworkOfThePlatform(t *testing.T) {
	t.Parallel()
	const mac = "52:54:00:ab:cd:01"
	route := func(network, gateway string, metric uint32) config.Route {
		return config.Route{Network: prefix(network), Gateway: addr(gateway), Metric: metric}
	}
	policy := route("10.6.0.0/16", "10.5.0.6", 7)
	policy.Table = 20
	for text, want := range map[string]config.Network{
		platformV1: {
			Nameservers: []netip.Addr{addr("10.5.0.9"), addr("9.9.9.9")}, SearchDomains: []string{"a.example", "b.example"},
			Interfaces: []config.Interface{
				{HardwareAddr: mac, MTU: 1400, Routes: []config.Route{route("0.0.0.0/0", "10.5.0.1", 0), route("::/0", "fd05::1", 0), route("fd06::/48", "fd05::6", 7)}},
				{HardwareAddr: mac, CIDR: prefix("10.5.0.2/24")}, {HardwareAddr: mac, CIDR: prefix("fd05::2/64")},
				{Name: "eth1", DHCP: true, AcceptRA: config.AdvertisementsOn},
			},
		},
		platformV2: {
			Nameservers: []netip.Addr{addr("10.5.0.9")}, SearchDomains: []string{"a.example"},
			Interfaces: []config.Interface{
				{Name: "eth1", DHCP: true, DHCP6: true, AcceptRA: config.AdvertisementsOff},
				{Name: "wan", HardwareAddr: mac, MTU: 1400, Routes: []config.Route{route("0.0.0.0/0", "10.5.0.1", 0), route("::/0", "fd05::1", 0), policy, route("10.7.0.1/32", "10.5.0.6", 0)}},
				{Name: "wan", HardwareAddr: mac, CIDR: prefix("10.5.0.2/24")}, {Name: "wan", HardwareAddr: mac, CIDR: prefix("fd05::2/64")},
			},
		},
		"": {},
	} {
		got, err := FromPlatform([]byte(text))
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); err != nil || diff != "" {
			t.Errorf("%s: %v %s", text, err, diff)
		}
	}
	for text, want := range map[string]string{
		"version: 2\nbonds: {}":                                "bonds isn't read",
		"ethernets: {a: {routing-policy: [], optional: true}}": "a: routing-policy isn't read",
		"ethernets: {a: {addresses: [{10.0.0.2/24: {}}]}}":     "cannot unmarshal",
		"ethernets: {a: {match: {name: en*}}}":                 "a: the name en* of several cards isn't read",
		"ethernets: {a: {addresses: [x/24]}}":                  "a: ParseAddr",
		"ethernets: {a: {addresses: [10.5.0.2/33]}}":           `a: mask "33": must be a mask`,
		"ethernets: {a: {gateway4: x}}":                        "ParseAddr",
		"ethernets: {a: {routes: [{to: x, via: 10.5.0.1}]}":    "yaml",
		"config: [{type: bond, name: bond0}]":                  "bond bond0 isn't read",
		"#cloud-config":                                        "",
		"[]":                                                   "cannot unmarshal",
	} {
		if _, err := FromPlatform([]byte(text)); (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

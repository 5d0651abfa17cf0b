package disks

import (
	"reflect"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
)

// The network that a server is reached by comes back as it was, and no secret is on META.
func TestKeptNetwork(t *testing.T) {
	t.Parallel()
	const document = `
machine:
  network:
    hostname: a
    nameservers: [10.0.0.1, "fd00::1"]
    interfaces:
      - {hardwareAddr: "52:54:00:*", cidr: 10.0.0.5/24, mtu: 9000, routes: [{network: 0.0.0.0/0, gateway: 10.0.0.1, metric: 5}]}
      - interface: bond0
        acceptRA: "off"
        bond: {mode: 802.3ad, interfaces: [eth0, eth1], lacpRate: fast}
        vlans: [{vlanId: 7, dhcp: true}]
      - {interface: br0, bridge: {interfaces: [eth2], stp: {enabled: true}}}
`
	read := func(text string) config.Network {
		t.Helper()
		var c config.Config
		if err := yaml.Unmarshal([]byte(text), &c); err != nil {
			t.Fatal(err)
		}
		return c.Machine.Network
	}
	n := read(document)
	if n.Interfaces[1].Bond == nil || !n.Interfaces[1].VLANs[0].DHCP || n.Interfaces[0].CIDR.Bits() != 24 {
		t.Fatalf("%+v", n)
	}
	with := n
	with.Interfaces = append(with.Interfaces, config.Interface{Name: "wg0", WireGuard: &config.WireGuard{PrivateKey: "hidden"}})
	with.Firewall.Rules = []config.FirewallRule{{}}
	text, err := networkText(with)
	if err != nil || strings.Contains(text, "hidden") || strings.Contains(text, "firewall") {
		t.Fatalf("%s, %v", text, err)
	}
	if got := read(text); !reflect.DeepEqual(got, n) {
		t.Errorf("%s\n%+v, want %+v", text, got, n)
	}
}

//go:build kernel

package network

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// file has a text, and its name.
func file(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// says waits until a file of the node's has all texts.
func (n *node) says(name string, want ...string) {
	n.t.Helper()
	eventually.That(n.t, 20*time.Second, fmt.Sprintf("%s has %q", name, want), func() error {
		text, err := os.ReadFile(filepath.Join(n.etc, name))
		for _, part := range want {
			if err == nil && !strings.Contains(string(text), part) {
				err = fmt.Errorf("it has %q", text)
			}
		}
		return err
	})
}

// gateways are those of the routes of the main table.
func gateways(t *testing.T, family int) (all []string) {
	t.Helper()
	list, err := netlink.RouteList(nil, family)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list {
		all = append(all, fmt.Sprintf("%v via %v", r.Dst, r.Gw))
	}
	return all
}

// Kea gives an address of IPv4, classless routes (RFC 3442), a long list of domains in two options (RFC 3396, RFC
// 3397), and name servers.
func TestKeaIPv4(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.48.0.1/24")
	var domains []string
	for i := range 12 {
		domains = append(domains, fmt.Sprintf("department-%d-of-the-research-institute.example.org", i))
	}
	p.runs("kea-dhcp4", "-c", file(t, fmt.Sprintf(`{"Dhcp4": {
		"interfaces-config": {"interfaces": ["far0"], "dhcp-socket-type": "raw"},
		"lease-database": {"type": "memfile", "persist": false},
		"valid-lifetime": 600, "loggers": [{"name": "kea-dhcp4", "severity": "WARN", "output_options": [{"output": "stderr"}]}],
		"subnet4": [{"subnet": "10.48.0.0/24", "pools": [{"pool": "10.48.0.77 - 10.48.0.77"}], "option-data": [
			{"name": "domain-name-servers", "data": "10.48.0.1"},
			{"name": "routers", "data": "10.48.0.9"},
			{"code": 121, "space": "dhcp4", "csv-format": false, "data": "000A300001180A630A0A300002"},
			{"name": "domain-search", "data": %q}]}]}}`, strings.Join(domains, ", "))))
	n := startNode(t, config.Network{})
	n.up(30 * time.Second)
	becomes(t, "eth0", "10.48.0.77/24")
	n.says("resolv.conf", "nameserver 10.48.0.1\n", "search "+domains[0])
	// With option 121, the client must not use option 3.
	if got := gateways(t, netlink.FAMILY_V4); !slices.Contains(got, "10.99.10.0/24 via 10.48.0.2") || !slices.Contains(got, "0.0.0.0/0 via 10.48.0.1") ||
		strings.Contains(fmt.Sprint(got), "10.48.0.9") {
		t.Errorf("routes: %q", got)
	}
}

// A network without IPv4: radvd announces the router, a name server and a domain, and that Kea has the addresses. The
// node's address is the one that Kea has reserved for the identifier of its MAC address.
func TestKeaIPv6AndRadvd(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.49.0.1/24")
	p.do(func() { p.address("far0", "fd49::1/64") })
	card, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	p.runs("kea-dhcp6", "-c", file(t, fmt.Sprintf(`{"Dhcp6": {
		"interfaces-config": {"interfaces": ["far0"], "service-sockets-max-retries": 50, "service-sockets-retry-wait-time": 200},
		"server-id": {"type": "EN", "enterprise-id": 32473, "identifier": "010203", "persist": false},
		"lease-database": {"type": "memfile", "persist": false},
		"preferred-lifetime": 500, "valid-lifetime": 600, "loggers": [{"name": "kea-dhcp6", "severity": "WARN", "output_options": [{"output": "stderr"}]}],
		"subnet6": [{"subnet": "fd49::/64", "interface": "far0", "pools": [{"pool": "fd49::50 - fd49::60"}],
			"reservations": [{"duid": "00:03:00:01:%s", "ip-addresses": ["fd49::77"]}], "option-data": [{"name": "dns-servers", "data": "fd49::53"}]}]}}`, card.Attrs().HardwareAddr)))
	p.runs("radvd", "--nodaemon", "--logmethod=stderr", "--pidfile="+filepath.Join(t.TempDir(), "pid"), "--config="+file(t, `interface far0 {
		AdvSendAdvert on; AdvManagedFlag on; MinRtrAdvInterval 3; MaxRtrAdvInterval 4;
		prefix fd49::/64 { AdvOnLink on; AdvAutonomous off; };
		RDNSS fd49::54 { }; DNSSL lab.example.org { };
	};`))
	n := startNode(t, config.Network{})
	n.up(2 * time.Minute)
	if got := n.address().Primary.String(); got != "fd49::77" {
		t.Errorf("the node's address is %s", got)
	}
	n.says("resolv.conf", "fd49::53", "fd49::54", "search lab.example.org")
	eventually.That(t, 10*time.Second, "the default route is that of an advertisement", func() error {
		if got := fmt.Sprint(gateways(t, netlink.FAMILY_V6)); !strings.Contains(got, "::/0 via fe80:") {
			return fmt.Errorf("routes: %s", got)
		}
		return nil
	})
}

// A router that is gone: the time of its route ends, and the static address stays.
func TestRouterThatEnds(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.50.0.1/24")
	p.do(func() { p.address("far0", "fd50::1/64") })
	stop := p.runs("radvd", "--nodaemon", "--logmethod=stderr", "--pidfile="+filepath.Join(t.TempDir(), "pid"), "--config="+file(t, `interface far0 {
		AdvSendAdvert on; MinRtrAdvInterval 3; MaxRtrAdvInterval 4; AdvDefaultLifetime 9;
		prefix fd50::/64 { AdvValidLifetime 60; AdvPreferredLifetime 30; };
	};`))
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.50.0.2/24"), DHCP: false}}})
	n.up(30 * time.Second)
	has := func(want bool) {
		t.Helper()
		eventually.That(t, time.Minute, fmt.Sprintf("a default route: %v", want), func() error {
			if got := fmt.Sprint(gateways(t, netlink.FAMILY_V6)); strings.Contains(got, "::/0 via fe80:") != want {
				return fmt.Errorf("routes: %s", got)
			}
			return nil
		})
	}
	has(true)
	stop() // killed: it says nothing, and the route's time ends
	has(false)
	if !slices.Contains(addresses(t, "eth0"), "10.50.0.2/24") {
		t.Errorf("addresses: %q", addresses(t, "eth0"))
	}
}

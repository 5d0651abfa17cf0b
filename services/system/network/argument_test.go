package network

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// The forms of the kernel's documentation and of dracut.
func TestNetworkOfTheKernelArgument(t *testing.T) {
	t.Parallel()
	to := func(network, gateway string) []config.Route {
		return []config.Route{{Network: prefix(network), Gateway: addr(gateway)}}
	}
	one := func(in config.Interface) config.Network { return config.Network{Interfaces: []config.Interface{in}} }
	named := one(config.Interface{Name: "eth0", CIDR: prefix("192.168.1.5/24"), Routes: to("0.0.0.0/0", "192.168.1.1")})
	named.Hostname, named.Nameservers = "n1", []netip.Addr{addr("9.9.9.9"), addr("2620:fe::fe")}
	for text, want := range map[string]config.Network{
		"dhcp":       {},
		"on":         {},
		"eth0:dhcp":  one(config.Interface{Name: "eth0", DHCP: true}),
		"eth0:dhcp6": one(config.Interface{Name: "eth0", DHCP6: true}),
		"eth0:auto6": one(config.Interface{Name: "eth0", AcceptRA: config.AdvertisementsOn}),
		"192.168.1.5::192.168.1.1:255.255.255.0:n1:eth0:none:9.9.9.9:[2620:fe::fe]":        named,
		"192.168.1.5:192.168.1.9:192.168.1.1:24:n1:eth0:off:9.9.9.9:[2620:fe::fe]:1.2.3.4": named,
		"192.168.1.5:::24::eth0:none":                one(config.Interface{Name: "eth0", CIDR: prefix("192.168.1.5/24")}),
		"[2001:db8::5]::[2001:db8::1]:64::eth0:none": one(config.Interface{Name: "eth0", CIDR: prefix("2001:db8::5/64"), Routes: to("::/0", "2001:db8::1")}),
		":::::eth1:dhcp":                             one(config.Interface{Name: "eth1", DHCP: true}),
	} {
		got, err := FromArgument(text)
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); err != nil || diff != "" {
			t.Errorf("ip=%s: %v %s", text, err, diff)
		}
	}
	for text, want := range map[string]string{
		"192.168.1.5:::24:::none":              "names no device",
		"192.168.1.5:::255.0.255.0::eth0:none": "must be a mask",
		"192.168.1.5:::::eth0:none":            "must be a mask",
		"192.168.1:::24::eth0:none":            "ParseAddr",
		"192.168.1.5":                          "must be dhcp, dhcp6 or auto6, or beside an address",
		"192.168.1.5::router:24::eth0:none":    "ParseAddr",
	} {
		if _, err := FromArgument(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ip=%s: %v, want %q", text, err, want)
		}
	}
}

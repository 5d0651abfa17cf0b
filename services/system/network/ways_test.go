package network

import (
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// A change that leaves a node without any way to an address is known before it is made.
func TestHasWay(t *testing.T) {
	t.Parallel()
	s := resource.NewStore()
	links := map[string]LinkStatus{
		"lo": {Kind: "device", State: "up"}, "eth0": {Kind: "device", State: "up", MAC: "02:00:00:00:00:01", Alias: "uplink"}, "eth1": {Kind: "device", State: "no carrier", MAC: "02:00:00:00:00:02"},
	}
	ignored := config.Interface{Name: "eth0", Ignore: true}
	if !HasWay(s, config.Network{Interfaces: []config.Interface{ignored}}) {
		t.Error("without known links nothing is known")
	}
	if err := Links.Replace(s.As("test"), links); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		interfaces []config.Interface
		want       bool
	}{
		"no entries":            {nil, true},
		"static":                {[]config.Interface{{Name: "eth0", CIDR: prefix("10.0.0.2/24")}}, true},
		"DHCP":                  {[]config.Interface{{Name: "eth0", DHCP: true}}, true},
		"an alias":              {[]config.Interface{{Name: "uplink", DHCP: true}}, true},
		"ignored":               {[]config.Interface{ignored}, false},
		"only an MTU":           {[]config.Interface{{Name: "eth0", MTU: 1400}}, false}, // it keeps DHCP,
		"a link that isn't":     {[]config.Interface{{Name: "eth7", DHCP: true}, ignored}, false},
		"a VLAN":                {[]config.Interface{{Name: "eth0", VLANs: []config.VLAN{{ID: 7, DHCP: true}}}}, true},
		"a VLAN on what isn't":  {[]config.Interface{{Name: "eth7", VLANs: []config.VLAN{{ID: 7, DHCP: true}}}, ignored}, false},
		"a bond":                {[]config.Interface{{Name: "bond0", DHCP: true, Bond: &config.Bond{Interfaces: []string{"eth0", "eth1"}}}}, true},
		"a bond without use":    {[]config.Interface{{Name: "bond0", Bond: &config.Bond{Interfaces: []string{"eth0", "eth1"}}}}, false},
		"a bridge":              {[]config.Interface{{Name: "br0", DHCP: true, Bridge: &config.Bridge{Interfaces: []string{"eth0"}}}}, true},
		"in a VRF":              {[]config.Interface{{Name: "eth0", DHCP: true}, {Name: "blue", VRF: &config.VRF{Interfaces: []string{"eth0"}}}}, false},
		"a dummy":               {[]config.Interface{ignored, {Name: "d0", CIDR: prefix("10.0.0.2/24"), Dummy: true}}, false},
		"unplugged and ignored": {[]config.Interface{ignored, {Name: "eth1", MTU: 1400}}, false},
	} {
		if got := HasWay(s, config.Network{Interfaces: tt.interfaces}); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

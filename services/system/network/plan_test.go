package network

import (
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

// What a link wants, of its settings and one lease.
func TestWanted(t *testing.T) {
	t.Parallel()
	gateway := config.DefaultRoute(addr("10.5.0.254"))
	inTable := gateway
	inTable.Table = 100
	for name, test := range map[string]struct {
		link config.Link
		want []string
	}{
		"a lease": {config.Link{}, []string{"address 10.5.0.7/24 of eth0", "route 0.0.0.0/0 via 10.5.0.1 metric 1024 on eth0"}},
		"a static default route in its place": {config.Link{Routes: []config.Route{gateway}},
			[]string{"address 10.5.0.7/24 of eth0", "route 0.0.0.0/0 via 10.5.0.254 metric 1024 on eth0"}},
		"a static default route of another table beside it": {config.Link{Routes: []config.Route{inTable}},
			[]string{"address 10.5.0.7/24 of eth0", "route 0.0.0.0/0 via 10.5.0.254 metric 1024 table 100 on eth0", "route 0.0.0.0/0 via 10.5.0.1 metric 1024 on eth0"}},
		"a lease whose routes have that table": {config.Link{Routes: []config.Route{inTable}, DHCPOptions: config.DHCPOptions{RouteTable: 100}},
			[]string{"address 10.5.0.7/24 of eth0", "route 0.0.0.0/0 via 10.5.0.254 metric 1024 table 100 on eth0"}},
	} {
		l := &lease{addresses: []leasedAddress{{Prefix: prefix("10.5.0.7/24")}}, routes: []route{{network: prefix("0.0.0.0/0"), gateway: addr("10.5.0.1")}}}
		var got []string
		for _, w := range wanted(2, test.link, []*lease{l}, 0, taken{}, time.Now()) {
			got = append(got, fmt.Sprint(w.object.on("eth0")))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// A card with an alias, also where another card has that name in the kernel.
func TestKernelName(t *testing.T) {
	t.Parallel()
	s := resource.NewStore()
	for name, alias := range map[string]string{"eth0": "eth1", "eth1": "eth0", "eth2": ""} {
		if err := Links.Put(s.As("test"), name, LinkStatus{Alias: alias}); err != nil {
			t.Fatal(err)
		}
	}
	for called, want := range map[string]string{"eth0": "eth1", "eth1": "eth0", "eth2": "eth2", "bond0": "bond0", "": ""} {
		if got := KernelName(s, called); got != want {
			t.Errorf("%q is %q, want %q", called, got, want)
		}
	}
}

// A change that leaves a node without any way to an address is known before it is made.
func TestHasWay(t *testing.T) {
	t.Parallel()
	s := resource.NewStore()
	ignored, spare := config.Interface{Name: "eth0", Ignore: true}, config.Interface{Name: "eth2", MTU: 1400}
	links := map[string]LinkStatus{
		"lo": {Kind: "device", State: "up"}, "eth0": {Kind: "device", State: "up", MAC: "02:00:00:00:00:01", Driver: "tulip", Alias: "uplink"}, "eth1": {Kind: "device", State: "no carrier", MAC: "02:00:00:00:00:02", Driver: "tulip"},
		"eth2": {Kind: "device", State: "up", MAC: "02:00:00:00:00:03", Permanent: "02:00:00:00:00:33", Driver: "virtio_net", BusPath: "0000:00:04.0"},
	}
	selected := func(in config.Interface) []config.Interface {
		in.DHCP = true
		return []config.Interface{ignored, in, spare}
	}
	if !HasWay(s, config.Network{Interfaces: []config.Interface{ignored}}) {
		t.Error("without known links nothing is known")
	}
	if err := Links.Replace(s.As("test"), links); err != nil {
		t.Fatal(err)
	}
	byRouter := map[string]Object{"eth0-2001:db8::5/64": {Link: "eth0", What: "2001:db8::5/64", By: byKernel}}
	if err := OnLinks.Replace(s.As("test"), byRouter); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		interfaces []config.Interface
		want       bool
	}{
		"no entries": {nil, true},
		"static":     {[]config.Interface{{Name: "eth0", CIDR: prefix("10.0.0.2/24")}}, true},
		"DHCP":       {[]config.Interface{{Name: "eth0", DHCP: true}}, true},
		"an alias":   {[]config.Interface{{Name: "uplink", DHCP: true}}, true},
		"ignored":    {[]config.Interface{ignored}, false},
		// its router gives it an address
		"only an MTU":           {[]config.Interface{{Name: "eth0", MTU: 1400}}, true},
		"an MTU and no router":  {[]config.Interface{{Name: "eth0", MTU: 1400, AcceptRA: config.AdvertisementsOff}}, false},
		"advertisements":        {[]config.Interface{ignored, {Name: "eth2", AcceptRA: config.AdvertisementsOn}}, true},
		"without a carrier":     {[]config.Interface{ignored, {Name: "eth1", CIDR: prefix("10.0.0.2/24")}}, false},
		"a link that isn't":     {[]config.Interface{{Name: "eth7", DHCP: true}, ignored}, false},
		"a VLAN":                {[]config.Interface{{Name: "eth0", VLANs: []config.VLAN{{ID: 7, DHCP: true}}}}, true},
		"a VLAN on what isn't":  {[]config.Interface{{Name: "eth7", VLANs: []config.VLAN{{ID: 7, DHCP: true}}}, ignored}, false},
		"a bond":                {[]config.Interface{{Name: "bond0", DHCP: true, Bond: &config.Bond{Interfaces: []string{"eth0", "eth1"}}}}, true},
		"a bond without use":    {[]config.Interface{{Name: "bond0", Bond: &config.Bond{Interfaces: []string{"eth0", "eth1"}}}}, false},
		"a bridge":              {[]config.Interface{{Name: "br0", DHCP: true, Bridge: &config.Bridge{Interfaces: []string{"eth0"}}}}, true},
		"in a VRF":              {[]config.Interface{{Name: "eth0", DHCP: true}, {Name: "blue", VRF: &config.VRF{Table: 1000, Interfaces: []string{"eth0"}}}}, false},
		"a dummy":               {[]config.Interface{ignored, {Name: "d0", CIDR: prefix("10.0.0.2/24"), Dummy: true}}, false},
		"a driver":              {selected(config.Interface{Driver: "virtio*"}), true},
		"a card of two":         {[]config.Interface{{Name: "uplink", Driver: "tulip", DHCP: true}}, true},
		"another driver":        {selected(config.Interface{Driver: "e1000e"}), false},
		"a bus path":            {selected(config.Interface{BusPath: "0000:00:04.*"}), true},
		"another bus path":      {selected(config.Interface{BusPath: "0000:00:05.*"}), false},
		"an address for good":   {selected(config.Interface{HardwareAddr: "02:00:00:00:00:33"}), true},
		"unplugged and ignored": {[]config.Interface{ignored, {Name: "eth1", MTU: 1400}}, false},
	} {
		if !slices.ContainsFunc(tt.interfaces, func(in config.Interface) bool { return in.Name == spare.Name }) && tt.interfaces != nil {
			tt.interfaces = append(tt.interfaces, spare)
		}
		if got := HasWay(s, config.Network{Interfaces: tt.interfaces}); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	// A default route by a lease or a setting stays, or another one takes its place.
	if err := Routes.Replace(s.As("test"), map[string]Object{"eth0": {Link: "eth0", What: "0.0.0.0/0 via 10.0.0.1 metric 1024", By: "DHCP from 10.0.0.1"}}); err != nil {
		t.Fatal(err)
	}
	static := config.Interface{Name: "eth0", CIDR: prefix("10.0.0.2/24")}
	if HasWay(s, config.Network{Interfaces: []config.Interface{static, spare}}) {
		t.Error("the last default route may go")
	}
	static.Routes = []config.Route{{Network: prefix("0.0.0.0/0"), Gateway: addr("10.0.0.1")}}
	if !HasWay(s, config.Network{Interfaces: []config.Interface{static, spare}}) {
		t.Error("a static default route isn't one")
	}
	for table, want := range map[uint32]bool{100: false, 254: true} {
		static.Routes[0].Table = table
		if got := HasWay(s, config.Network{Interfaces: []config.Interface{static, spare}}); got != want {
			t.Errorf("a default route of table %d: %v", table, got)
		}
	}
	links = map[string]LinkStatus{"lo": {Kind: "device", State: "up"}, "eth0": {Kind: "device", State: "no carrier"}}
	if err := Links.Replace(s.As("test"), links); err != nil {
		t.Fatal(err)
	}
	if !HasWay(s, config.Network{Interfaces: []config.Interface{ignored}}) {
		t.Error("a node without any way can lose one")
	}
}

// The card that an entry has once selected stays its card in later boots, whichever is found first, and a second one
// that matches doesn't take it away. One that is out gives its place to the only other one until it is back.
func TestSelectedCardIsKept(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "node-address")
	entry := config.Link{Driver: "virtio*"}
	card := func(index int, name, mac string) netlink.Link {
		hardware, err := net.ParseMAC(mac)
		if err != nil {
			t.Fatal(err)
		}
		return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index, Name: name, HardwareAddr: hardware, PermHWAddr: hardware}}
	}
	o := &owner{}
	has := func(want string, cards ...netlink.Link) {
		t.Helper()
		o.links, o.errs = map[string]netlink.Link{}, map[string]error{}
		for _, l := range cards {
			o.links[l.Attrs().Name] = l
		}
		if got := o.selected("virtio*", "uplink", entry); got != want {
			t.Errorf("of %d cards, the entry has %s, want %s", len(cards), got, want)
		}
	}
	boots := func() {
		t.Helper()
		o = &owner{Daemon: &Daemon{chosen: map[string]int{}}, log: slog.New(slog.DiscardHandler), cards: map[string]string{}, configured: true}
		o.o = Options{pinFile: file, pinReady: func() bool { return true }, physical: func(netlink.Link) bool { return true }}
		o.o.card = func(l netlink.Link) config.Card {
			return config.Card{Name: l.Attrs().Name, HardwareAddr: l.Attrs().PermHWAddr.String(), Driver: "virtio_net"}
		}
		o.recall()
	}
	boots()
	has("uplink")
	first, second := card(2, "eth0", "02:00:00:00:00:01"), card(3, "eth1", "02:00:00:00:00:02")
	has("uplink", first, second)
	if err := o.errs["choose uplink"]; err == nil || !strings.Contains(err.Error(), "eth0, eth1 match") {
		t.Errorf("two cards: %v", err)
	}
	has("eth0", first)
	has("eth0", first, second)
	o.pinned = addr("10.5.0.2")
	if err := o.pin("node"); err != nil {
		t.Fatal(err)
	}

	boots()
	first, second = card(3, "eth1", "02:00:00:00:00:01"), card(2, "eth0", "02:00:00:00:00:02")
	has("eth0", second)
	has("eth1", second, first)
	has("eth0", second)
	if o.pinned != addr("10.5.0.2") || o.hostname != "node" || !maps.Equal(o.cards, o.savedCards) {
		t.Errorf("the address %s, the name %s, the cards %v", o.pinned, o.hostname, o.cards)
	}
}

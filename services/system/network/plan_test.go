package network

import (
	"fmt"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/google/go-cmp/cmp"
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

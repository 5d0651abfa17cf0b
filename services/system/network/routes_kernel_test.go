//go:build kernel

package network

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
)

// Routes of each family have a table, a metric, a source and an MTU, or none of them; a gateway outside of the link's
// networks is on the link; several default routes are there beside each other, and rules choose a table.
func TestRoutesOfEachFamily(t *testing.T) {
	for name, f := range map[string]struct {
		flag, own, net, gateway, outside, wide, all, unit string
	}{
		"IPv4": {"-4", "10.30.0.2/24", "172.30.%d.0/24", "10.30.0.1", "192.0.2.1", "172.31.0.0/16", "0.0.0.0/0", ""},
		"IPv6": {"-6", "fd30::2/64", "fd31:%d::/64", "fd30::1", "fd32::1", "fd33::/48", "::/0", " pref medium"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t)
			p.wire("eth0", "far0", strings.Replace(f.own, "2/", "1/", 1))
			p.wire("eth1", "far1", "10.30.9.1/24")
			to := func(i int) config.Route {
				return config.Route{Network: prefix(fmt.Sprintf(f.net, i)), Gateway: addr(f.gateway)}
			}
			table, metric, source, size, outside, near := to(1), to(2), to(3), to(4), to(5), to(6)
			table.Table, metric.Metric, source.Source, size.MTU, outside.Gateway = 4294967295, 7, prefix(f.own).Addr(), 1280, addr(f.outside)
			near.Gateway = config.Route{}.Gateway
			way := func(kind config.RouteType, i int) config.Route {
				return config.Route{Network: prefix(fmt.Sprintf(f.net, i)), Type: kind}
			}
			spare := config.DefaultRoute(addr(f.gateway))
			spare.Metric = 2000
			inTable := config.DefaultRoute(addr(f.outside))
			inTable.Table = 100
			n := startNode(t, config.Network{
				Interfaces: []config.Interface{
					static("eth0", f.own, 0, table, metric, source, size, outside, near, way("blackhole", 7), way("unreachable", 8), way("prohibit", 9), spare, inTable),
					static("eth0", f.own, 0, config.DefaultRoute(addr(f.gateway))),
					static("eth1", "10.30.9.2/24", 0, config.DefaultRoute(addr(f.outside))),
				},
				Rules: []config.Rule{{Priority: 1000, From: prefix(f.wide), Table: 100}, {Priority: 1001, To: prefix(f.wide), Table: 100}},
			})
			n.up(20 * time.Second)
			n.follows()
			net := func(i int) string { return fmt.Sprintf(f.net, i) }
			shows(t, net(1)+" via "+f.gateway+" dev eth0 proto 103 metric 1024", f.flag, "route", "show", "table", "4294967295")
			for _, line := range []string{
				net(2) + " via " + f.gateway + " dev eth0 proto 103 metric 7",
				net(3) + " via " + f.gateway + " dev eth0 proto 103 src " + prefix(f.own).Addr().String() + " metric 1024",
				net(4) + " via " + f.gateway + " dev eth0 proto 103 metric 1024 mtu 1280",
				net(5) + " via " + f.outside + " dev eth0 proto 103 metric 1024",
				net(6) + " dev eth0 proto 103 ",
				"blackhole " + net(7), "unreachable " + net(8), "prohibit " + net(9),
				"default via " + f.gateway + " dev eth0 proto 103 metric 1024", "default via " + f.gateway + " dev eth0 proto 103 metric 2000",
				"default via " + f.outside + " dev eth1 proto 103 metric 1025",
			} {
				shows(t, line, f.flag, "route")
			}
			shows(t, "default via "+f.outside+" dev eth0 proto 103 metric 1024", f.flag, "route", "show", "table", "100")
			shows(t, "1000:\tfrom "+f.wide+" lookup 100 proto 103", f.flag, "rule")
			shows(t, "1001:\tfrom all to "+f.wide+" lookup 100 proto 103", f.flag, "rule")
		})
	}
}

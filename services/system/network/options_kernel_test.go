//go:build kernel

package network

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// A node with an address waits for a link that is required, also for the carrier of one with a static address, and not
// longer than its bound.
func TestRequiredLink(t *testing.T) {
	before := requiredGrace
	requiredGrace = 20 * time.Second
	t.Cleanup(func() { requiredGrace = before })
	for name, test := range map[string]struct {
		entry config.Interface
		waits string
		plug  bool
	}{
		"static, and its cable comes": {config.Interface{Name: "eth1", CIDR: prefix("10.57.1.2/24")}, `a carrier on "eth1"`, true},
		"static, without a cable":     {config.Interface{Name: "eth1", CIDR: prefix("10.57.1.2/24")}, `a carrier on "eth1"`, false},
		"DHCP, and its cable comes":   {config.Interface{Name: "eth1", DHCP: true}, `DHCP answer on "eth1"`, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t)
			p.wire("eth0", "far0", "10.57.0.1/24")
			p.cable("eth1", "far-eth1")
			p.do(func() { p.address("far-eth1", "10.57.1.1/24") })
			test.entry.Required = true
			n := startNode(t, config.Network{Nameservers: []netip.Addr{addr("10.57.0.1")}, Interfaces: []config.Interface{static("eth0", "10.57.0.2/24", 0), test.entry}})
			eventually.That(t, 10*time.Second, "networkd waits", func() error {
				if s, _ := n.graph.Status(ID); s.Up || !strings.Contains(s.Message, test.waits) {
					return fmt.Errorf("up %t: %s", s.Up, s.Message)
				}
				return nil
			})
			began := time.Now()
			if test.plug {
				p.plug("eth1", true)
				p.dnsmasq("--interface=far-eth1", "--dhcp-range=10.57.1.50,10.57.1.60,2m")
			}
			n.up(requiredGrace + 5*time.Second)
			if took := time.Since(began); took > requiredGrace-5*time.Second == test.plug {
				t.Errorf("up after %s", took)
			}
			if !test.plug {
				n.hasProblem(test.waits)
			}
		})
	}
}

// Routes by class (option 33) count where there are none without classes (option 121), and a server knows a node by
// its identifier (option 61): another one gets another address.
func TestStaticRoutesAndIdentifierOfDHCP(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.98.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.98.0.50,10.98.0.60,2m", "--dhcp-option=3,10.98.0.1",
		"--dhcp-option=33,172.30.0.0,10.98.0.254,192.168.7.0,10.98.0.253", "--dhcp-host=id:rack-7,10.98.0.77", "--dhcp-host=id:rack-8,10.98.0.78")
	entry := config.Interface{Name: "eth0", DHCP: true, DHCPOptions: config.DHCPOptions{ClientIdentifier: "rack-7"}}
	n := startNode(t, config.Network{Interfaces: []config.Interface{entry}})
	n.up(20 * time.Second)
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.98.0.77/24")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.98.0.1 metric 1024",
		"172.30.0.0/16 via 10.98.0.254 metric 1024", "192.168.7.0/24 via 10.98.0.253 metric 1024")
	entry.DHCPOptions.ClientIdentifier = "rack-8"
	n.configure(config.Network{Interfaces: []config.Interface{entry}})
	becomes(t, "eth0", "10.98.0.78/24")
}

// The kernel takes all options of bonds, with each mode those that the checks allow, and has them then.
func TestS092AllBondOptions(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.97.0.1/24")
	p.wire("eth1", "far1", "10.97.1.1/24")
	no, yes := new(false), new(true)
	n := startNode(t, config.Network{Nameservers: []netip.Addr{addr("10.97.0.1")}})
	for mode, test := range map[string]struct {
		bond config.Bond
		want map[string]string // by file in sysfs
	}{
		"802.3ad": {config.Bond{MinLinks: new(1), ADSelect: "bandwidth", ADActorSysPrio: new(7), ADUserPortKey: new(9), ADActorSystem: "02:ab:00:00:00:01",
			LPInterval: new(3), ResendIGMP: new(4), NumPeerNotif: new(5), AllSlavesActive: yes, UpDelay: 200, DownDelay: 300},
			map[string]string{"min_links": "1", "ad_select": "bandwidth 1", "ad_actor_sys_prio": "7", "ad_user_port_key": "9", "ad_actor_system": "02:ab:00:00:00:01",
				"lp_interval": "3", "resend_igmp": "4", "num_grat_arp": "5", "all_slaves_active": "1", "updelay": "200", "downdelay": "300"}},
		"active-backup": {config.Bond{Primary: "eth1", PrimaryReselect: "better", FailOverMAC: "active", ARPInterval: 500,
			ARPIPTarget: []netip.Addr{addr("10.97.0.1"), addr("10.97.1.1")}, ARPValidate: "active", ARPAllTargets: "all"},
			map[string]string{"primary": "eth1", "primary_reselect": "better 1", "fail_over_mac": "active 1", "arp_interval": "500",
				"arp_ip_target": "10.97.0.1 10.97.1.1", "arp_validate": "active 1", "arp_all_targets": "all 1", "miimon": "0"}},
		"balance-rr":  {config.Bond{PacketsPerSlave: new(3)}, map[string]string{"packets_per_slave": "3"}},
		"balance-tlb": {config.Bond{TLBDynamicLB: no}, map[string]string{"tlb_dynamic_lb": "0"}},
	} {
		test.bond.Mode, test.bond.Interfaces = mode, []string{"eth0", "eth1"}
		n.configure(config.Network{Interfaces: []config.Interface{{Name: "bond0", CIDR: prefix("10.97.0.2/24"), Bond: &test.bond}}})
		test.want["mode"] = mode + " " + fmt.Sprint(int(netlink.StringToBondMode(mode)))
		memberOf(t, "eth0", "bond0")
		memberOf(t, "eth1", "bond0")
		for _, file := range slices.Sorted(maps.Keys(test.want)) {
			eventually.That(t, 20*time.Second, mode+" with "+file+" "+test.want[file], func() error {
				text, err := os.ReadFile("/sys/class/net/bond0/bonding/" + file)
				if got := strings.TrimSpace(string(text)); err == nil && got != test.want[file] {
					err = fmt.Errorf("it is %q", got)
				}
				return err
			})
		}
		n.follows()
	}
}

// Cards are selected by driver and bus path, which veths don't have: the test says them. They are published, for
// HasWay. A selector of two cards selects none.
func TestCardsByDriverAndBusPath(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.96.0.1/24")
	p.wire("eth1", "far1", "10.96.1.1/24")
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.card = func(l netlink.Link) config.Card {
			name := l.Attrs().Name
			return config.Card{Name: name, HardwareAddr: l.Attrs().HardwareAddr.String(), Driver: "virtio_net", BusPath: strings.Replace(name, "eth", "0000:00:0", 1) + ".0"}
		}
	}
	uplink := config.Interface{Name: "uplink", Driver: "virtio*", BusPath: "0000:00:00.0", CIDR: prefix("10.96.0.2/24"), VLANs: []config.VLAN{{ID: 7, CIDR: prefix("10.96.7.2/24")}}}
	storage := config.Interface{BusPath: "*:01.0", CIDR: prefix("10.96.1.2/24")}
	network := func(entries ...config.Interface) config.Network {
		return config.Network{Nameservers: []netip.Addr{addr("10.96.0.1")}, Interfaces: entries}
	}
	n.configure(network(uplink, storage))
	n.run(cards)
	n.up(20 * time.Second)
	becomes(t, "eth0", "10.96.0.2/24")
	becomes(t, "eth1", "10.96.1.2/24")
	becomes(t, "uplink.7", "10.96.7.2/24")
	shows(t, "altname uplink", "link", "show", "dev", "eth0")
	n.follows()
	eventually.That(t, 10*time.Second, "the cards are published", func() error {
		if l, err := Links.Get(n.store, "eth1"); err != nil || l.Spec.Driver != "virtio_net" || l.Spec.BusPath != "0000:00:01.0" || l.Spec.Permanent == "" {
			return fmt.Errorf("%+v (%v)", l.Spec, err)
		}
		return nil
	})
	both := config.Interface{Name: "any", Driver: "virtio_net", CIDR: prefix("10.96.0.3/24")}
	n.configure(network(both, static("eth0", "10.96.0.2/24", 0)))
	becomes(t, "eth1")
	n.hasProblem("choose the card of the entry \"any\": eth0, eth1 match")
}

//go:build kernel

package network

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"reflect"
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

// choices are the values of an option of bonds that the configuration takes, as its schema says.
func choices(t *testing.T, option string) (all []string) {
	t.Helper()
	var find func(fields []config.Field)
	find = func(fields []config.Field) {
		for _, f := range fields {
			if f.Path == "machine.network.interfaces[].bond."+option {
				all = f.Choices
			}
			find(f.Fields)
		}
	}
	if find(config.Fields()); len(all) == 0 {
		t.Fatalf("%s has no choices", option)
	}
	return all
}

// bondHas waits until files of a bond have these values. Of those with a name and a number, the name is enough.
func bondHas(t *testing.T, what string, want map[string]string) {
	t.Helper()
	for _, file := range slices.Sorted(maps.Keys(want)) {
		eventually.That(t, 70*time.Second, what+" with "+file+" "+want[file], func() error {
			text, err := os.ReadFile("/sys/class/net/bond0/bonding/" + file)
			got := strings.TrimSpace(string(text))
			if name, _, _ := strings.Cut(got, " "); err == nil && got != want[file] && name != want[file] {
				err = fmt.Errorf("it is %q", got)
			}
			return err
		})
	}
}

// optionsOfBonds are all options of the configuration, with each mode those that the checks allow, and the kernel's
// files that show them.
type bondOptions struct {
	mode string
	bond config.Bond
	want map[string]string
}

func optionsOfBonds(t *testing.T) (all []bondOptions) {
	no, yes := new(false), new(true)
	all = []bondOptions{
		{"802.3ad", config.Bond{MinLinks: new(1), ADActorSysPrio: new(7), ADUserPortKey: new(9), ADActorSystem: "02:ab:00:00:00:01", LACPActive: no,
			LPInterval: new(3), ResendIGMP: new(4), NumPeerNotif: new(5), PeerNotifyDelay: 200, AllSlavesActive: yes, UpDelay: 200, DownDelay: 300},
			map[string]string{"min_links": "1", "ad_actor_sys_prio": "7", "ad_user_port_key": "9", "ad_actor_system": "02:ab:00:00:00:01", "lacp_active": "off",
				"lp_interval": "3", "resend_igmp": "4", "num_grat_arp": "5", "peer_notif_delay": "200", "all_slaves_active": "1", "updelay": "200", "downdelay": "300"}},
		{"802.3ad", config.Bond{LACPActive: yes}, map[string]string{"lacp_active": "on"}},
		{"active-backup", config.Bond{Primary: "eth1", ARPInterval: 500, ARPMissedMax: 7, ARPIPTarget: []netip.Addr{addr("10.97.0.1"), addr("10.97.1.1")}},
			map[string]string{"primary": "eth1", "arp_interval": "500", "arp_missed_max": "7", "arp_ip_target": "10.97.0.1 10.97.1.1", "miimon": "0"}},
		{"balance-rr", config.Bond{PacketsPerSlave: new(3), UseCarrier: no}, map[string]string{"packets_per_slave": "3", "use_carrier": "0"}},
		{"balance-tlb", config.Bond{TLBDynamicLB: no}, map[string]string{"tlb_dynamic_lb": "0"}},
	}
	for _, mode := range []string{"balance-rr", "balance-xor", "broadcast"} {
		all = append(all, bondOptions{mode, config.Bond{ARPInterval: 400, ARPIPTarget: []netip.Addr{addr("10.97.0.1")}, ARPMissedMax: 3, ARPValidate: "filter", ARPAllTargets: "all"},
			map[string]string{"arp_interval": "400", "arp_ip_target": "10.97.0.1", "arp_missed_max": "3", "arp_validate": "filter", "arp_all_targets": "all"}})
	}
	for _, mode := range []string{"balance-tlb", "balance-alb"} {
		all = append(all, bondOptions{mode, config.Bond{Primary: "eth0", PrimaryReselect: "failure"}, map[string]string{"primary": "eth0", "primary_reselect": "failure"}})
	}
	// Each value of the options that have names for them, several options at a time.
	for _, o := range []struct {
		mode, options string
		make          func(value func(option string) string) config.Bond
	}{
		{"active-backup", "arpValidate arpAllTargets failOverMac primaryReselect", func(value func(string) string) config.Bond {
			return config.Bond{ARPInterval: 500, ARPIPTarget: []netip.Addr{addr("10.97.0.1")}, Primary: "eth0", ARPValidate: value("arpValidate"), ARPAllTargets: value("arpAllTargets"),
				FailOverMAC: value("failOverMac"), PrimaryReselect: value("primaryReselect")}
		}},
		{"802.3ad", "xmitHashPolicy lacpRate adSelect", func(value func(string) string) config.Bond {
			return config.Bond{XmitHashPolicy: value("xmitHashPolicy"), LACPRate: value("lacpRate"), ADSelect: value("adSelect")}
		}},
	} {
		files := map[string]string{"arpValidate": "arp_validate", "arpAllTargets": "arp_all_targets", "failOverMac": "fail_over_mac", "primaryReselect": "primary_reselect",
			"xmitHashPolicy": "xmit_hash_policy", "lacpRate": "lacp_rate", "adSelect": "ad_select"}
		for i := range choices(t, strings.Fields(o.options)[0]) { // the option with the most values
			value := func(option string) string { c := choices(t, option); return c[i%len(c)] }
			want := map[string]string{}
			for _, option := range strings.Fields(o.options) {
				want[files[option]] = value(option)
			}
			all = append(all, bondOptions{o.mode, o.make(value), want})
		}
	}
	return all
}

// The kernel takes all options of bonds, with each mode those that the checks allow and with each value, and has them
// then.
func TestS092AllBondOptions(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.97.0.1/24")
	p.wire("eth1", "far1", "10.97.1.1/24")
	n := startNode(t, config.Network{Nameservers: []netip.Addr{addr("10.97.0.1")}})
	set := map[string]bool{"Mode": true, "Interfaces": true, "MIIMon": true} // by all, and TestS092LACPAndVLAN
	for _, test := range optionsOfBonds(t) {
		for f, value := range reflect.ValueOf(test.bond).Fields() {
			set[f.Name] = set[f.Name] || !value.IsZero()
		}
		test.bond.Mode, test.bond.Interfaces = test.mode, []string{"eth0", "eth1"}
		n.configure(config.Network{Interfaces: []config.Interface{{Name: "bond0", CIDR: prefix("10.97.0.2/24"), Bond: &test.bond}}})
		test.want["mode"] = test.mode
		bondHas(t, test.mode, test.want)
		memberOf(t, "eth0", "bond0")
		memberOf(t, "eth1", "bond0")
		n.follows()
	}
	for f := range reflect.TypeFor[config.Bond]().Fields() {
		if !set[f.Name] {
			t.Errorf("no test sets %s", f.Name)
		}
	}
	n.quiet()
}

// Options that another program changes are set again, and those that go from the configuration are the kernel's again.
func TestOptionsOfABondComeBack(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.97.0.1/24")
	settings := func(b config.Bond) config.Network {
		b.Interfaces = []string{"eth0"}
		return config.Network{Interfaces: []config.Interface{{Name: "bond0", CIDR: prefix("10.97.0.2/24"), Bond: &b}}}
	}
	write := func(file, value string) {
		t.Helper()
		if err := os.WriteFile("/sys/class/net/bond0/bonding/"+file, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	arp := config.Bond{Mode: "active-backup", ARPInterval: 500, ARPIPTarget: []netip.Addr{addr("10.97.0.1")}, ARPMissedMax: 7, ARPValidate: "filter_active"}
	n := startNode(t, settings(arp))
	n.up(20 * time.Second)
	want := map[string]string{"arp_ip_target": "10.97.0.1", "arp_missed_max": "7", "arp_validate": "filter_active"}
	bondHas(t, "at first", want)
	first := indexOf(t, "bond0", 0)
	write("arp_missed_max", "9")
	write("arp_validate", "none")
	bondHas(t, "again", want)
	if now := indexOf(t, "bond0", 0); now != first {
		t.Error("the bond was made anew")
	}
	arp.ARPMissedMax = 0
	n.configure(settings(arp))
	indexOf(t, "bond0", first)
	bondHas(t, "without arpMissedMax", map[string]string{"arp_missed_max": "2"})

	n.configure(settings(config.Bond{Mode: "802.3ad", ADActorSystem: "02:ab:00:00:00:01", LACPActive: new(false)}))
	want = map[string]string{"ad_actor_system": "02:ab:00:00:00:01", "lacp_active": "off"}
	bondHas(t, "with another mode", want)
	write("ad_actor_system", "02:ab:00:00:00:02")
	bondHas(t, "again", want)
	n.configure(settings(config.Bond{Mode: "802.3ad"}))
	bondHas(t, "without lacpActive", map[string]string{"ad_actor_system": "00:00:00:00:00:00", "lacp_active": "on"})
	n.follows()
}

// An option of a bond that the kernel refuses is a problem of that link, which works, and nothing else waits.
func TestOptionOfABondThatTheKernelRefuses(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.97.2.1/24")
	p.wire("eth1", "far1", "10.97.3.1/24")
	card := static("eth0", "10.97.2.2/24", 0)
	n := startNode(t, config.Network{Interfaces: []config.Interface{card}})
	n.up(10 * time.Second)
	refused := config.Interface{Name: "bond0", CIDR: prefix("10.97.3.2/24"), Bond: &config.Bond{Interfaces: []string{"eth1"}, LPInterval: new(0)}}
	card.CIDR = prefix("10.97.2.3/24")
	n.configure(config.Network{Interfaces: []config.Interface{refused, card}})
	becomes(t, "eth0", "10.97.2.3/24")
	becomes(t, "bond0", "10.97.3.2/24")
	n.follows("set an option of bond0: write /sys/class/net/bond0/bonding/lp_interval: invalid argument")
	refused.Bond = &config.Bond{Interfaces: []string{"eth1"}, LPInterval: new(1)}
	n.configure(config.Network{Interfaces: []config.Interface{refused, card}})
	becomes(t, "bond0", "10.97.3.2/24")
	n.follows()
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

//go:build kernel

package network

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// far is the link that contains the far ends of several cables.
const far = "trunk"

// joined connects the node's links by cables to far, which it makes, with this address.
func (p *peer) joined(with netlink.Link, cidr string, links ...string) {
	p.t.Helper()
	for _, node := range links {
		p.cable(node, "far-"+node)
	}
	p.do(func() {
		err := netlink.LinkAdd(with)
		for _, node := range links {
			l, there := netlink.LinkByName("far-" + node)
			err = errors.Join(err, there)
			if err == nil {
				err = errors.Join(netlink.LinkSetMaster(l, with), netlink.LinkSetUp(l))
			}
		}
		if err != nil {
			p.t.Errorf("make %s: %v", far, err)
			return
		}
		p.address(far, cidr)
		linkUp(p.t, far)
	})
}

// lacpTrunk is the far end on a switch that supports LACP.
func lacpTrunk() netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = far
	b := netlink.NewLinkBond(attrs)
	b.Mode, b.LacpRate, b.Miimon = netlink.BOND_MODE_802_3AD, netlink.BOND_LACP_RATE_FAST, 50
	return b
}

// plainTrunk is a switch that doesn't support bonds.
func plainTrunk() netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = far
	return &netlink.Bridge{LinkAttrs: attrs}
}

// tagged makes a VLAN of far, with this address.
func (p *peer) tagged(id int, cidr string) {
	p.t.Helper()
	p.do(func() {
		parent, err := netlink.LinkByName(far)
		if err == nil {
			err = netlink.LinkAdd(virtual{name: config.VLANName(far, id), vlan: config.VLAN{ID: id}}.link(parent.Attrs().Index))
		}
		if err != nil {
			p.t.Errorf("make VLAN %d: %v", id, err)
			return
		}
		p.address(config.VLANName(far, id), cidr)
		linkUp(p.t, config.VLANName(far, id))
	})
}

// plug sets the far end of a cable up or down.
func (p *peer) plug(node string, in bool) {
	p.t.Helper()
	p.do(func() {
		l, err := netlink.LinkByName("far-" + node)
		if err == nil && in {
			err = netlink.LinkSetUp(l)
		} else if err == nil {
			err = netlink.LinkSetDown(l)
		}
		if err != nil {
			p.t.Errorf("plug %s: %v", node, err)
		}
	})
}

// echoPort is the port on which the peer returns what it receives.
const echoPort = "7"

func (p *peer) echo() {
	p.t.Helper()
	var l net.Listener
	p.do(func() {
		var err error
		if l, err = net.Listen("tcp", ":"+echoPort); err != nil {
			p.t.Errorf("%v", err)
		}
	})
	p.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
}

// reach asks an address of the peer once.
func reach(address string, wait time.Duration) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", net.JoinHostPort(address, echoPort), wait)
	if err != nil {
		return nil, err
	}
	if err := echo(c, wait); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func echo(c net.Conn, wait time.Duration) error {
	const text = "is somebody there?"
	err := c.SetDeadline(time.Now().Add(wait))
	if err == nil {
		_, err = io.WriteString(c, text)
	}
	got := make([]byte, len(text))
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err == nil && string(got) != text {
		err = fmt.Errorf("heard %q", got)
	}
	return err
}

// connect waits for an answer, and returns the connection.
func connect(t *testing.T, address string) net.Conn {
	t.Helper()
	var c net.Conn
	eventually.That(t, 10*time.Second, address+" answers", func() (err error) {
		c, err = reach(address, time.Second)
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// goesOn checks that a connection still works. TCP retransmits lost packets.
func goesOn(t *testing.T, c net.Conn) {
	t.Helper()
	if err := echo(c, eventually.Scale(10*time.Second)); err != nil {
		t.Errorf("traffic doesn't go on: %v", err)
	}
}

func theBond(name string) (*netlink.Bond, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return nil, err
	}
	b, is := l.(*netlink.Bond)
	if !is {
		return nil, fmt.Errorf("%s is a %s", name, l.Type())
	}
	return b, nil
}

// bondIs waits until is returns true for bond0, and returns it.
func bondIs(t *testing.T, what string, is func(b *netlink.Bond) bool) *netlink.Bond {
	t.Helper()
	var b *netlink.Bond
	eventually.That(t, 20*time.Second, "bond0 "+what, func() (err error) {
		if b, err = theBond("bond0"); err == nil && !is(b) {
			err = fmt.Errorf("it has mode %s, miimon %d, active %d", b.Mode, b.Miimon, b.ActiveSlave)
		}
		return err
	})
	return b
}

// aggregates waits until so many members are in one aggregator with the partner.
func aggregates(t *testing.T, ports int, partner net.HardwareAddr) *netlink.Bond {
	t.Helper()
	want := fmt.Sprintf("%d with %s", ports, partner)
	eventually.That(t, 20*time.Second, "bond0 aggregates "+want, func() error {
		num, err1 := os.ReadFile("/sys/class/net/bond0/bonding/ad_num_ports")
		mac, err2 := os.ReadFile("/sys/class/net/bond0/bonding/ad_partner_mac")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if got := strings.TrimSpace(string(num)) + " with " + strings.TrimSpace(string(mac)); got != want {
			return errors.New(got)
		}
		return nil
	})
	return bondIs(t, "has mode 802.3ad", func(b *netlink.Bond) bool { return b.Mode == netlink.BOND_MODE_802_3AD })
}

// hardware is the address of far, which identifies its system in LACP.
func (p *peer) hardware() (address net.HardwareAddr) {
	p.t.Helper()
	p.do(func() {
		l, err := netlink.LinkByName(far)
		if err != nil {
			p.t.Errorf("%v", err)
			return
		}
		address = l.Attrs().HardwareAddr
	})
	return address
}

func mtuIs(t *testing.T, want int, links ...string) {
	t.Helper()
	for _, name := range links {
		eventually.That(t, 5*time.Second, fmt.Sprintf("%s has an MTU of %d", name, want), func() error {
			l, err := netlink.LinkByName(name)
			if err == nil && l.Attrs().MTU != want {
				err = fmt.Errorf("it has %d", l.Attrs().MTU)
			}
			return err
		})
	}
}

// onlyLinks checks that none of our links is left.
func onlyLinks(t *testing.T, want ...string) {
	t.Helper()
	eventually.That(t, 5*time.Second, fmt.Sprintf("only %v are there", want), func() error {
		all, err := netlink.LinkList()
		if err != nil {
			return err
		}
		var names []string
		for _, l := range all {
			names = append(names, l.Attrs().Name)
		}
		slices.Sort(names)
		if !slices.Equal(names, want) {
			return fmt.Errorf("there are %v", names)
		}
		return nil
	})
}

func bonded(mode string, miimon int, vlans ...config.VLAN) config.Network {
	return config.Network{Interfaces: []config.Interface{{
		Name: "bond0", CIDR: prefix("10.21.0.2/24"), MTU: 2000, VLANs: vlans,
		Bond: &config.Bond{Mode: mode, LACPRate: "fast", XmitHashPolicy: "layer3+4", MIIMon: new(miimon), Interfaces: []string{"eth0", "eth1"}},
	}}}
}

// S-092, S-093: a bond negotiates LACP with another system, a VLAN on it gets
// an address by DHCP, and traffic continues while one of two links is down.
func TestS092LACPAndVLAN(t *testing.T) {
	p := newPeer(t)
	p.joined(lacpTrunk(), "10.21.0.1/24", "eth0", "eth1")
	p.tagged(7, "10.21.7.1/24")
	p.dnsmasq("--interface="+config.VLANName(far, 7), "--dhcp-range=10.21.7.50,10.21.7.59,2m")
	p.echo()
	n := startNode(t, bonded("802.3ad", 50, config.VLAN{ID: 7, DHCP: true}))
	n.up(20 * time.Second)
	bond := aggregates(t, 2, p.hardware())
	if bond.LacpRate != netlink.BOND_LACP_RATE_FAST || bond.XmitHashPolicy != netlink.BOND_XMIT_HASH_POLICY_LAYER3_4 || bond.Miimon != 50 {
		t.Errorf("the bond is %+v", bond)
	}
	same(t, "addresses of bond0", addresses(t, "bond0"), "10.21.0.2/24")
	if got := addresses(t, "bond0.7"); len(got) != 1 || !strings.HasPrefix(got[0], "10.21.7.5") {
		t.Errorf("the VLAN has %v", got)
	}
	mtuIs(t, 2000, "bond0", "eth0", "eth1", "bond0.7")
	untagged, tagged := connect(t, "10.21.0.1"), connect(t, "10.21.7.1")
	for _, link := range []string{"eth0", "eth1"} {
		p.plug(link, false)
		aggregates(t, 1, p.hardware())
		goesOn(t, untagged)
		goesOn(t, tagged)
		p.plug(link, true)
		aggregates(t, 2, p.hardware())
		goesOn(t, untagged)
		goesOn(t, tagged)
	}
	n.follows()
	n.quiet()
}

// quiet checks that nothing was refused at any time.
func (n *node) quiet() {
	n.t.Helper()
	if text := n.console.String(); regexp.MustCompile(`networkd: (make|take|set|give|remove|objects|address|route|MTU) `).MatchString(text) {
		n.t.Errorf("something was refused:\n%s", text)
	}
}

// S-092, S-093: a bond and its VLANs follow the configuration, and are removed with it.
func TestS092BondFollows(t *testing.T) {
	p := newPeer(t)
	p.joined(lacpTrunk(), "10.21.0.1/24", "eth0", "eth1")
	p.tagged(7, "10.21.7.1/24")
	p.echo()
	seven := config.VLAN{ID: 7, CIDR: prefix("10.21.7.2/24")}
	eight := config.VLAN{ID: 8, CIDR: prefix("10.21.7.2/24")}
	n := startNode(t, bonded("802.3ad", 50, seven))
	n.up(20 * time.Second)
	first := aggregates(t, 2, p.hardware())
	connect(t, "10.21.7.1")

	// Another VLAN: the bond stays. The peer isn't in that VLAN.
	n.configure(bonded("802.3ad", 50, eight))
	missingLink(t, "bond0.7")
	becomes(t, "bond0.8", "10.21.7.2/24")
	if c, err := reach("10.21.7.1", time.Second); err == nil {
		c.Close()
		t.Error("VLAN 7 answers in VLAN 8")
	}
	if b, err := theBond("bond0"); err != nil || b.Index != first.Index {
		t.Errorf("the bond was made anew (%v)", err)
	}
	p.tagged(8, "10.21.8.1/24")
	eight.CIDR = prefix("10.21.8.2/24")
	n.configure(bonded("802.3ad", 50, eight))
	connect(t, "10.21.8.1")

	// Another option: another bond, with the VLAN on it.
	n.configure(bonded("802.3ad", 100, eight))
	bondIs(t, "has another miimon", func(b *netlink.Bond) bool { return b.Miimon == 100 && b.Index != first.Index })
	aggregates(t, 2, p.hardware())
	becomes(t, "bond0.8", "10.21.8.2/24")
	connect(t, "10.21.8.1")
	connect(t, "10.21.0.1")
	mtuIs(t, 2000, "bond0", "eth0", "eth1", "bond0.8")
	n.follows()

	n.configure(bonded("active-backup", 100, eight))
	bondIs(t, "has another mode", func(b *netlink.Bond) bool { return b.Mode == netlink.BOND_MODE_ACTIVE_BACKUP })
	memberOf(t, "eth0", "bond0")
	memberOf(t, "eth1", "bond0")
	becomes(t, "bond0.8", "10.21.8.2/24")
	n.follows()

	n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.21.0.2/24", 0), {Name: "eth1", Ignore: true}}})
	onlyLinks(t, "eth0", "eth1", "lo")
	becomes(t, "eth0", "10.21.0.2/24")
	becomes(t, "eth1")
	n.follows()
	n.quiet()
}

// The negative twin: if the other end doesn't support LACP there is no partner,
// and each link is an aggregator of its own.
func TestS092LACPWithoutPartner(t *testing.T) {
	p := newPeer(t)
	p.joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1")
	n := startNode(t, bonded("802.3ad", 50))
	n.up(20 * time.Second)
	// Before that, a partner still has time to answer.
	eventually.That(t, 20*time.Second, "a member goes without a partner", func() error {
		states := map[string]int{}
		for _, link := range []string{"eth0", "eth1"} {
			text, err := os.ReadFile("/sys/class/net/" + link + "/bonding_slave/ad_actor_oper_port_state")
			if err != nil {
				return err
			}
			if states[link], err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
				return err
			}
			// IEEE 802.1AX-2014 6.4.2.3; LACP_STATE_ in drivers/net/bonding/bond_3ad.c of Linux.
			const synchronized, defaulted, expired = 0x08, 0x40, 0x80
			if states[link]&(synchronized|defaulted|expired) == synchronized|defaulted {
				return nil
			}
		}
		return fmt.Errorf("states %v", states)
	})
	aggregates(t, 1, make(net.HardwareAddr, 6))
	n.follows()
}

// S-092: with active-backup one link has the traffic, and the other takes over.
func TestS092ActiveBackup(t *testing.T) {
	p := newPeer(t)
	p.joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1")
	p.echo()
	n := startNode(t, bonded("active-backup", 50))
	n.up(20 * time.Second)
	index := map[string]int{}
	for _, name := range []string{"eth0", "eth1"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		index[name] = l.Attrs().Index
	}
	traffic := connect(t, "10.21.0.1")
	b, err := theBond("bond0")
	if err != nil {
		t.Fatal(err)
	}
	active, other := "eth0", "eth1"
	if b.ActiveSlave == index[other] {
		active, other = other, active
	}
	for range 2 {
		p.plug(active, false)
		bondIs(t, "uses "+other, func(b *netlink.Bond) bool { return b.ActiveSlave == index[other] })
		goesOn(t, traffic)
		p.plug(active, true)
		eventually.That(t, 5*time.Second, active+" has a carrier", func() error {
			l, err := netlink.LinkByName(active)
			if err == nil && !carrier(l) {
				err = errors.New("it has none")
			}
			return err
		})
		goesOn(t, traffic)
		active, other = other, active
	}
	// An option that another program changes is set again, on the same link.
	if err := os.WriteFile("/sys/class/net/bond0/bonding/miimon", []byte("400"), 0); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 70*time.Second, "bond0 has its miimon again", func() error {
		if now, err := theBond("bond0"); err != nil || now.Miimon != 50 || now.Index != b.Index {
			return fmt.Errorf("%+v (%v)", now, err)
		}
		return nil
	})
	n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.21.0.2/24", 0), {Name: "eth1", Ignore: true}}})
	onlyLinks(t, "eth0", "eth1", "lo")
	n.follows()
	n.quiet()
}

// S-092: the kernel accepts every mode that the configuration allows, with each
// option.
func TestS092EachBondMode(t *testing.T) {
	p := newPeer(t)
	p.joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1")
	n := startNode(t, bonded("balance-rr", 100))
	n.up(20 * time.Second)
	for _, mode := range []string{"active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb", "balance-rr"} {
		n.configure(bonded(mode, 100))
		bondIs(t, "has mode "+mode, func(b *netlink.Bond) bool { return b.Mode == netlink.StringToBondMode(mode) })
		memberOf(t, "eth0", "bond0")
		memberOf(t, "eth1", "bond0")
		becomes(t, "bond0", "10.21.0.2/24")
		n.follows()
	}
	n.quiet()
}

// The kernel loads its module for bonds with the first one, and the module makes
// a bond named bond0. That isn't ours, and none of its settings may be left.
func TestS092FirstBond(t *testing.T) {
	if err := unix.DeleteModule("bonding", 0); err != nil && !errors.Is(err, unix.ENOENT) {
		t.Fatalf("unload the module bonding: %v", err)
	}
	newPeer(t).joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1")
	n := startNode(t, bonded("active-backup", 50))
	n.up(20 * time.Second)
	bondIs(t, "is ours", func(b *netlink.Bond) bool { return b.Mode == netlink.BOND_MODE_ACTIVE_BACKUP && b.Miimon == 50 })
	memberOf(t, "eth0", "bond0")
	memberOf(t, "eth1", "bond0")
	n.follows()
	n.quiet()
}

// A bond has the address of its first member in the order of the configuration, also if
// that one appears last: reservations and the node's name depend on it.
func TestS092BondHasTheAddressOfItsFirstMember(t *testing.T) {
	p := newPeer(t)
	p.joined(plainTrunk(), "10.21.0.1/24", "eth0", "eth1", "eth2")
	hasAddressOf := func(first string) {
		t.Helper()
		for _, member := range []string{"eth0", "eth1", "eth2"} {
			memberOf(t, member, "bond0")
		}
		bondIs(t, "has the address of "+first, func(b *netlink.Bond) bool {
			at, err := os.ReadFile("/sys/class/net/" + first + "/bonding_slave/perm_hwaddr")
			return err == nil && strings.TrimSpace(string(at)) == b.HardwareAddr.String()
		})
	}
	of := func(members ...string) config.Network {
		c := bonded("active-backup", 50)
		c.Interfaces[0].Bond.Interfaces = members
		return c
	}
	n := startNode(t, of("eth2", "eth0", "eth1"))
	n.up(20 * time.Second)
	l, err := theBond("bond0")
	if err != nil {
		t.Fatal(err)
	}
	if o, err := Hostnames.Get(n.store, HostnameID); err != nil || o.Spec != hostnameFromMAC(l.HardwareAddr) {
		t.Errorf("the node's name is %q, and the bond has %s (%v)", o.Spec, l.HardwareAddr, err)
	}
	for _, members := range [][]string{{"eth2", "eth0", "eth1"}, {"eth1", "eth2", "eth0"}, {"eth0", "eth1", "eth2"}, {"eth1", "eth0", "eth2"}, {"eth2", "eth1", "eth0"}} {
		n.configure(config.Network{Interfaces: []config.Interface{static("lo", "10.21.9.2/32", 0)}})
		missingLink(t, "bond0")
		n.configure(of(members...))
		hasAddressOf(members[0])
	}
	n.quiet()
	n.stop()

	// The driver finds the first card after another one, during the boot.
	for _, name := range []string{"bond0", "eth0"} {
		if l, err := netlink.LinkByName(name); err != nil || netlink.LinkDel(l) != nil {
			t.Fatalf("remove %s: %v", name, err)
		}
	}
	c := of("eth0", "eth1", "eth2")
	c.Interfaces = append(c.Interfaces, static("eth9", "10.21.9.2/24", 0))
	startNode(t, c)
	memberOf(t, "eth1", "bond0")
	p.cable("eth0", "again-eth0")
	hasAddressOf("eth0")
}

//go:build kernel

package network

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// guide is the network of a document of the guides, which is merged into a generated one and
// loaded as a node does it.
func guide(t *testing.T, file string) config.Network {
	t.Helper()
	example, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "testdata", "guides", file))
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := config.NewSecrets(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	whole, err := config.Generate(config.Options{Type: config.ControlPlane, Endpoint: "https://10.23.0.2:6443", Secrets: secrets})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := whole.Encode()
	if err == nil {
		doc, err = patch.Apply(doc, example)
	}
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := config.Load(file, doc)
	if err != nil {
		t.Fatal(err)
	}
	return c.Machine.Network
}

// S-059, S-092: the guides' bond has each option in the kernel, DHCP runs on the bond itself, and
// the lease stays while each link fails, and when the bond is made anew for other delays.
func TestS092DHCPOnTheGuidesBond(t *testing.T) {
	p := newPeer(t)
	p.joined(lacpTrunk(), "10.23.0.1/24", "eth0", "eth1")
	p.dnsmasq("--interface="+far, "--dhcp-range=10.23.0.50,10.23.0.59,2m")
	p.echo()
	n := startNode(t, guide(t, "01-bonding.yaml"))
	n.up(20 * time.Second)
	has := func(b *netlink.Bond, up, down int) bool {
		return b.Mode == netlink.BOND_MODE_802_3AD && b.LacpRate == netlink.BOND_LACP_RATE_FAST &&
			b.XmitHashPolicy == netlink.BOND_XMIT_HASH_POLICY_LAYER3_4 && b.Miimon == 100 && b.UpDelay == up && b.DownDelay == down
	}
	first := aggregates(t, 2, p.hardware())
	if !has(first, 200, 200) {
		t.Errorf("the bond is %+v", first)
	}
	leased := addresses(t, "bond0")
	if len(leased) != 1 || !strings.HasPrefix(leased[0], "10.23.0.5") {
		t.Fatalf("bond0 has %v", leased)
	}
	same(t, "routes of bond0", routes(t, "bond0"), "0.0.0.0/0 via 10.23.0.1 metric 1024")
	if got := n.address(); len(got.All) != 1 || got.All[0].String() != leased[0] {
		t.Errorf("node address is %+v", got)
	}
	traffic := connect(t, "10.23.0.1")
	for _, link := range []string{"eth0", "eth1"} {
		same(t, "addresses of "+link, addresses(t, link))
		p.plug(link, false)
		aggregates(t, 1, p.hardware())
		goesOn(t, traffic)
		p.plug(link, true)
		aggregates(t, 2, p.hardware())
		goesOn(t, traffic)
	}
	same(t, "addresses of bond0", addresses(t, "bond0"), leased...)

	c := guide(t, "01-bonding.yaml")
	c.Interfaces[0].Bond.UpDelay, c.Interfaces[0].Bond.DownDelay = 300, 0
	n.configure(c)
	bondIs(t, "has other delays", func(b *netlink.Bond) bool { return b.Index != first.Index && has(b, 300, 0) })
	aggregates(t, 2, p.hardware())
	becomes(t, "bond0", leased...)
	connect(t, "10.23.0.1")
	n.follows()
	n.quiet()
}

// S-060, S-093: the guides' VLAN has its address, and the node's default route, on a real link.
// Its parent has no address, although a server would give one.
func TestS093DefaultRouteOfTheGuidesVLAN(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", far, "10.23.1.1/24")
	p.dnsmasq("--interface="+far, "--dhcp-range=10.23.1.50,10.23.1.59,2m")
	p.tagged(100, "192.168.2.1/28")
	p.do(func() { p.address("lo", "198.51.100.7/32"); p.address("lo", "172.20.0.7/32") })
	p.echo()
	n := startNode(t, guide(t, "01-vlans.yaml"))
	n.up(10 * time.Second)
	is := func(what string, route string) {
		t.Helper()
		same(t, what+": addresses of eth0.100", addresses(t, "eth0.100"), "192.168.2.10/28")
		same(t, what+": addresses of eth0", addresses(t, "eth0"))
		same(t, what+": routes of eth0", routes(t, "eth0"))
		eventually.That(t, 5*time.Second, what+": the route is "+route, func() error {
			if got := routes(t, "eth0.100"); len(got) != 1 || got[0] != route {
				return errors.New(strings.Join(got, ", "))
			}
			return nil
		})
	}
	const byDefault = "0.0.0.0/0 via 192.168.2.1 metric 1024"
	is("at first", byDefault)
	if got := n.address(); got.Primary != addr("192.168.2.10") || len(got.All) != 1 {
		t.Errorf("node address is %+v", got)
	}
	connect(t, "198.51.100.7")

	// The kernel drops the routes with the parent's link.
	parent, err := netlink.LinkByName("eth0")
	if err == nil {
		err = netlink.LinkSetDown(parent)
	}
	if err != nil {
		t.Fatal(err)
	}
	is("after the parent was down", byDefault)
	connect(t, "198.51.100.7")

	c := guide(t, "01-vlans.yaml")
	c.Interfaces[0].VLANs[0].Routes = []config.Route{{Network: prefix("172.20.0.0/16"), Gateway: addr("192.168.2.1"), Metric: 10}}
	n.configure(c)
	n.follows()
	is("with another route", "172.20.0.0/16 via 192.168.2.1 metric 10")
	connect(t, "172.20.0.7")
	if conn, err := reach("198.51.100.7", time.Second); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("without the default route: %v, %v", conn, err)
	}
	n.quiet()
}

// S-091: both addresses that the guides add to the loopback link are there, other machines reach
// them, and they go without the link's own one.
func TestS091TheGuidesAddressesOfLoopback(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.23.2.1/24")
	c := guide(t, "01-additional-addresses.yaml")
	both := c.Interfaces
	card := static("eth0", "10.23.2.2/24", 0)
	c.Interfaces = append(both, card)
	n := startNode(t, c)
	n.up(10 * time.Second)
	same(t, "addresses of lo", addresses(t, "lo"), "127.0.0.1/8", "192.168.0.21/24", "10.2.2.2/24")
	becomes(t, "eth0", "10.23.2.2/24")
	for _, address := range []string{"192.168.0.21", "10.2.2.2"} {
		p.do(func() {
			if err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(prefix(address + "/32")), Gw: net.ParseIP("10.23.2.2")}); err != nil {
				t.Errorf("route to %s: %v", address, err)
			}
		})
		l, err := net.Listen("tcp", net.JoinHostPort(address, echoPort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() { io.Copy(conn, conn); conn.Close() }()
			}
		}()
		p.do(func() {
			conn, err := reach(address, eventually.Scale(5*time.Second))
			if err != nil {
				t.Errorf("the peer doesn't reach %s: %v", address, err)
				return
			}
			conn.Close()
		})
	}
	c.Interfaces = []config.Interface{both[1], card}
	n.configure(c)
	becomes(t, "lo", "127.0.0.1/8", "10.2.2.2/24")
	c.Interfaces = []config.Interface{card}
	n.configure(c)
	becomes(t, "lo", "127.0.0.1/8")
	n.follows()
	n.quiet()
}

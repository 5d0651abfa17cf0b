//go:build kernel

package network

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/uml"
)

// peer is another machine: a network namespace.
type peer struct {
	t  *testing.T
	ns netns.NsHandle
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	uml.Booted(t)
	p := &peer{t: t}
	inThread(t, func() {
		var err error
		if p.ns, err = netns.New(); err != nil {
			t.Errorf("new network namespace: %v", err)
		}
	})
	t.Cleanup(func() { p.ns.Close() })
	p.do(func() { linkUp(t, "lo") })
	return p
}

// do runs f with the peer's network: sockets and processes made in it stay there.
func (p *peer) do(f func()) {
	inThread(p.t, func() {
		if err := netns.Set(p.ns); err != nil {
			p.t.Errorf("enter network namespace: %v", err)
			return
		}
		f()
	})
}

// inThread runs f on a thread that ends after it.
func inThread(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		f()
	}()
	<-done
	if t.Failed() {
		t.FailNow()
	}
}

func linkUp(t *testing.T, name string) {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		t.Errorf("set %s up: %v", name, err)
	}
}

// wire joins the node's link to a link of the peer with this address.
func (p *peer) wire(node, there, cidr string) {
	p.t.Helper()
	p.cable(node, there)
	p.do(func() {
		p.address(there, cidr)
		linkUp(p.t, there)
	})
}

// cable joins the node's link to a link of the peer, which is down.
func (p *peer) cable(node, there string) {
	p.t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: node}, PeerName: there}
	if err := netlink.LinkAdd(veth); err != nil {
		p.t.Fatalf("add link %s: %v", node, err)
	}
	p.t.Cleanup(func() { netlink.LinkDel(veth) })
	end, err := netlink.LinkByName(there)
	if err == nil {
		err = netlink.LinkSetNsFd(end, int(p.ns))
	}
	if err != nil {
		p.t.Fatalf("move link %s: %v", there, err)
	}
}

// address is for do.
func (p *peer) address(link, cidr string) {
	addr, err := netlink.ParseAddr(cidr)
	if err == nil {
		var l netlink.Link
		if l, err = netlink.LinkByName(link); err == nil {
			err = netlink.AddrAdd(l, addr)
		}
	}
	if err != nil {
		p.t.Errorf("add %s to %s: %v", cidr, link, err)
	}
}

// dnsmasq serves DHCP on the peer until the test ends or stop is called.
func (p *peer) dnsmasq(args ...string) (stop func()) {
	p.t.Helper()
	return p.runs("dnsmasq", append([]string{
		"--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root", "--pid-file=",
		"--log-facility=-", "--dhcp-authoritative", "--dhcp-leasefile=" + filepath.Join(p.t.TempDir(), "leases"),
		"--no-ping",
	}, args...)...)
}

// runs starts a program at the other end, until the test or stop ends it.
func (p *peer) runs(program string, args ...string) (stop func()) {
	p.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "KEA_PIDFILE_DIR="+p.t.TempDir(), "KEA_LOCKFILE_DIR=none")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	p.do(func() {
		if err := cmd.Start(); err != nil {
			p.t.Errorf("start %s (dev setup installs it): %v", program, err)
		}
	})
	stop = sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if p.t.Failed() {
			p.t.Logf("%s: %s", program, out.String())
		}
	})
	p.t.Cleanup(stop)
	return stop
}

// node is networkd with its inputs.
type node struct {
	t       *testing.T
	store   *resource.Store
	graph   *dag.Graph
	console *syncBuffer
	etc     string
	pin     string
	change  func(*Options) // of what run gives networkd
	before  *config.Network
	stop    func()
}

func startNode(t *testing.T, cfg config.Network) *node {
	t.Helper()
	return startNodeIn(t, t.TempDir(), cfg)
}

func startNodeIn(t *testing.T, dir string, cfg config.Network) *node {
	t.Helper()
	// The test's cards are veths.
	return startNodeWith(t, dir, cfg, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") })
}

func startNodeWith(t *testing.T, dir string, cfg config.Network, physical func(netlink.Link) bool) *node {
	t.Helper()
	n := newNode(t, dir)
	n.configure(cfg)
	n.run(physical)
	return n
}

func newNode(t *testing.T, dir string) *node {
	return &node{t: t, store: resource.NewStore(), console: &syncBuffer{}, etc: dir, pin: filepath.Join(dir, "node-address")}
}

// run runs networkd until the test ends or stop is called.
func (n *node) run(physical func(netlink.Link) bool) {
	t := n.t
	t.Helper()
	l := logs.New(n.console)
	o := Options{
		Store:  n.store,
		etcDir: n.etc, pinFile: n.pin, pinReady: func() bool { return true },
		physical: physical,
	}
	if n.change != nil {
		n.change(&o)
	}
	d := New(o)
	if n.before != nil {
		d.Use(*n.before)
	}
	var err error
	n.graph, err = dag.New(dag.Options{Log: l.Logger}, d.Service())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.graph.Run(ctx)
	}()
	n.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(func() {
		n.stop()
		if t.Failed() {
			t.Logf("console:\n%s\nlog:\n%s", n.console, strings.Join(l.Tail(ID, 100), "\n"))
		}
	})
}

func (n *node) configure(cfg config.Network) {
	n.t.Helper()
	c := &config.Config{Machine: config.Machine{Network: cfg}}
	c.FillDefaults()
	if err := configuration.Configs.Put(n.store.As("test"), configuration.ConfigID, c); err != nil {
		n.t.Fatal(err)
	}
	n.stage(configuration.Configured)
}

func (n *node) stage(s configuration.Stage) {
	n.t.Helper()
	if err := configuration.Stages.Put(n.store.As("test"), configuration.StageID, s); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) up(within time.Duration) {
	n.t.Helper()
	eventually.That(n.t, within, "networkd is up", func() error {
		if s, _ := n.graph.Status(ID); !s.Up {
			return fmt.Errorf("%s: %s", s.State, s.Message)
		}
		return nil
	})
}

func (n *node) address() NodeAddress {
	n.t.Helper()
	o, err := Addresses.Get(n.store, AddressID)
	if err != nil {
		n.t.Fatal(err)
	}
	return o.Spec
}

// addresses are the IPv4 addresses of the link in the kernel.
func addresses(t *testing.T, link string) []string {
	t.Helper()
	out, err := addressesOf(link)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func addressesOf(link string) (out []string, err error) {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return nil, err
	}
	list, err := netlink.AddrList(l, netlink.FAMILY_V4)
	for _, a := range list {
		out = append(out, a.IPNet.String())
	}
	return out, err
}

// routes are the IPv4 routes of the link that the kernel didn't make by itself.
func routes(t *testing.T, link string) []string {
	t.Helper()
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	list, err := netlink.RouteList(l, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, r := range list {
		if r.Protocol == unix.RTPROT_KERNEL {
			continue
		}
		out = append(out, fmt.Sprintf("%s via %v metric %d", r.Dst, r.Gw, r.Priority))
	}
	slices.Sort(out)
	return out
}

func same(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s are\n\t%s\nwant\n\t%s", what, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// S-090: static address with default route and MTU; two cards, one ignored.
func TestS090StaticAndIgnored(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.5.0.1/24")
	p.wire("eth1", "far1", "10.6.0.1/24")
	p.dnsmasq("--interface=far1", "--dhcp-range=10.6.0.50,10.6.0.60,2m")

	n := startNode(t, config.Network{
		Hostname:    "node-1.example.org",
		Nameservers: []netip.Addr{addr("10.5.0.1"), addr("10.5.0.3")},
		Interfaces: []config.Interface{
			{Name: "eth0", CIDR: prefix("10.5.0.2/24"), MTU: 1400, Routes: []config.Route{
				{Network: prefix("0.0.0.0/0"), Gateway: addr("10.5.0.1")},
				{Network: prefix("172.20.0.0/16"), Gateway: addr("10.5.0.7"), Metric: 10},
			}},
			{Name: "eth0", CIDR: prefix("10.5.0.9/24")}, // S-091
			{Name: "eth1", Ignore: true},
		},
	})
	n.up(5 * time.Second)

	same(t, "addresses of eth0", addresses(t, "eth0"), "10.5.0.2/24", "10.5.0.9/24")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.5.0.1 metric 1024", "172.20.0.0/16 via 10.5.0.7 metric 10")
	same(t, "addresses of lo", addresses(t, "lo"), "127.0.0.1/8")
	l, _ := netlink.LinkByName("eth0")
	if l.Attrs().MTU != 1400 {
		t.Errorf("MTU of eth0 is %d", l.Attrs().MTU)
	}
	ignored, _ := netlink.LinkByName("eth1")
	if ignored.Attrs().Flags&net.FlagUp != 0 || len(addresses(t, "eth1")) > 0 {
		t.Errorf("eth1 was to be ignored, and is %v with %v", ignored.Attrs().Flags, addresses(t, "eth1"))
	}
	if got := n.address(); got.Primary != addr("10.5.0.2") || !strings.Contains(got.Why, "eth0") {
		t.Errorf("node address is %+v", got)
	}
	// S-095
	n.names("node-1.example.org", "10.5.0.2 node-1.example.org node-1\n", "nameserver 10.5.0.1\nnameserver 10.5.0.3\n")
}

// Two default routes of one metric, and one from DHCP: the kernel would keep
// only the last. The route of the first link has priority. The same with IPv6.
func TestDefaultRoutesOfSeveralLinks(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.13.0.1/24")
	p.wire("eth1", "far1", "10.13.1.1/24")
	p.wire("eth2", "far2", "10.13.2.1/24")
	p.dnsmasq("--interface=far2", "--dhcp-range=10.13.2.50,10.13.2.60,2m")
	static := func(link, cidr, network, gateway string) config.Interface {
		return config.Interface{Name: link, CIDR: prefix(cidr), Routes: []config.Route{{Network: prefix(network), Gateway: addr(gateway)}}}
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		static("eth1", "10.13.1.2/24", "0.0.0.0/0", "10.13.1.1"),
		static("eth1", "2001:db8:1::2/64", "::/0", "2001:db8:1::1"),
		static("eth0", "10.13.0.2/24", "0.0.0.0/0", "10.13.0.1"),
		{Name: "eth2", DHCP: true},
	}})
	n.up(10 * time.Second)
	same(t, "routes of eth1", routes(t, "eth1"), "0.0.0.0/0 via 10.13.1.1 metric 1024")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.13.0.1 metric 1025")
	same(t, "routes of eth2", routes(t, "eth2"), "0.0.0.0/0 via 10.13.2.1 metric 1026")
	if got := n.address(); got.Primary != addr("10.13.1.2") || len(got.All) != 4 || got.All[1] != prefix("2001:db8:1::2/64") {
		t.Errorf("node address is %+v", got)
	}
	out, err := exec.Command("ip", "-6", "route", "show", "default").Output()
	if err != nil || !strings.Contains(string(out), "via 2001:db8:1::1 dev eth1") {
		t.Errorf("IPv6 default route: %s (%v)", out, err)
	}
}

// names checks the node's name in the kernel and in all files.
func (n *node) names(hostname, hostsLine, resolv string) {
	n.t.Helper()
	if kernel, _ := os.Hostname(); kernel != hostname {
		n.t.Errorf("kernel's host name is %q, want %q", kernel, hostname)
	}
	if o, err := Hostnames.Get(n.store, HostnameID); err != nil || o.Spec != hostname {
		n.t.Errorf("published host name is %q (%v), want %q", o.Spec, err, hostname)
	}
	for file, part := range map[string]string{"hostname": hostname + "\n", "hosts": hostsLine, "resolv.conf": resolv} {
		data, err := os.ReadFile(filepath.Join(n.etc, file))
		if err != nil || !strings.Contains(string(data), part) {
			n.t.Errorf("%s is %q (%v), want %q in it", file, data, err, part)
		}
	}
}

// S-094: a link without configuration gets DHCP, from a real server (dnsmasq).
func TestS094UnconfiguredLinkUsesDHCP(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.7.0.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.7.0.50,10.7.0.60,2m",
		"--dhcp-option=option:router,10.7.0.1", "--dhcp-option=option:dns-server,10.7.0.53", "--dhcp-option=option:ntp-server,10.7.0.123",
		"--dhcp-option=option:mtu,1380", "--dhcp-host=set:node,*:*:*:*:*:*,10.7.0.55,box7")

	n := startNode(t, config.Network{})
	n.up(10 * time.Second)

	same(t, "addresses of eth0", addresses(t, "eth0"), "10.7.0.55/24")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.7.0.1 metric 1024")
	l, _ := netlink.LinkByName("eth0")
	if l.Attrs().MTU != 1380 {
		t.Errorf("MTU of eth0 is %d", l.Attrs().MTU)
	}
	n.names("box7", "10.7.0.55 box7\n", "nameserver 10.7.0.53\n")
	if o, err := TimeServers.Get(n.store, TimeServersID); err != nil || !slices.Equal(o.Spec, []netip.Addr{addr("10.7.0.123")}) {
		t.Errorf("time servers are %v (%v)", o.Spec, err)
	}
}

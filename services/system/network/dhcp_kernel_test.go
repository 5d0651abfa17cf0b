//go:build kernel

package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/vishvananda/netlink"
)

// quickLeases allows leases of a few seconds.
func quickLeases(t *testing.T) {
	t.Helper()
	before := minLease
	minLease = 5 * time.Second
	t.Cleanup(func() { minLease = before })
}

// shortServer grants leases of a few seconds, unlike real servers.
type shortServer struct {
	t       *testing.T
	seconds uint32
	server  net.IP // the identifier that it sends
	stop    func()

	mu   sync.Mutex // guards all following fields
	give net.IP
	mute bool     // receives and doesn't answer
	nak  bool     // refuses to extend a lease, to all as RFC 2131 §4.1 demands
	seen []string // requests that extend a lease: source, destination, address
	// declined are the addresses that clients gave back.
	declined []decline
}

func (p *peer) shortServer(link, addr, give string, seconds uint32) *shortServer {
	p.t.Helper()
	s := &shortServer{t: p.t, seconds: seconds, server: net.ParseIP(addr), give: net.ParseIP(give)}
	var server *server4.Server
	p.do(func() {
		var err error
		if server, err = server4.NewServer(link, nil, s.handle); err != nil {
			p.t.Errorf("DHCP server: %v", err)
		}
	})
	done := make(chan struct{})
	go func() { defer close(done); server.Serve() }()
	s.stop = sync.OnceFunc(func() { server.Close(); <-done })
	p.t.Cleanup(s.stop)
	return s
}

func (s *shortServer) handle(conn net.PacketConn, from net.Addr, m *dhcpv4.DHCPv4) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.MessageType() == dhcpv4.MessageTypeDecline {
		s.noteDecline(m)
		return
	}
	kind := dhcpv4.MessageTypeOffer
	if m.MessageType() == dhcpv4.MessageTypeRequest {
		kind = dhcpv4.MessageTypeAck
	}
	to := from
	if !m.ClientIPAddr.IsUnspecified() {
		s.seen = append(s.seen, fmt.Sprintf("%s server=%v", from, m.ServerIdentifier()))
	} else {
		to = &net.UDPAddr{IP: net.IPv4bcast, Port: 68}
	}
	if s.mute {
		return
	}
	if s.nak && to == from {
		kind, to = dhcpv4.MessageTypeNak, &net.UDPAddr{IP: net.IPv4bcast, Port: 68}
	}
	reply, err := dhcpv4.NewReplyFromRequest(m,
		dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(s.give), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithLeaseTime(s.seconds), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(s.server)))
	if err == nil {
		_, err = conn.WriteTo(reply.ToBytes(), to)
	}
	if err != nil {
		s.t.Logf("DHCP server: answer %s: %v", from, err)
	}
}

func (s *shortServer) extensions() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

func (s *shortServer) set(f func(*shortServer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

// A lease of six seconds is renewed, by unicast from its own address and without
// a server identifier (RFC 2131 §4.3.2), and ends after the server has ended.
func TestRenewalAndExpiryOnTheWire(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.0.1/24")
	quickLeases(t)
	s := p.shortServer("far0", "10.8.0.1", "10.8.0.77", 6)
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	eventually.That(t, 30*time.Second, "the lease is renewed twice", func() error {
		if got := s.extensions(); len(got) < 2 {
			return fmt.Errorf("extensions: %v", got)
		}
		return nil
	})
	for _, got := range s.extensions() {
		if got != "10.8.0.77:68 server=<nil>" {
			t.Errorf("renewed as %q", got)
		}
	}
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.8.0.77/24")

	s.stop()
	eventually.That(t, 30*time.Second, "the address is removed when the lease ends", func() error {
		if got := addresses(t, "eth0"); len(got) > 0 {
			return fmt.Errorf("addresses: %v", got)
		}
		return nil
	})
	eventually.That(t, 10*time.Second, "the console hears of it", func() error {
		if !strings.Contains(n.console.String(), "lost the DHCP lease of 10.8.0.77/24 on eth0: it expired unanswered") {
			return fmt.Errorf("console: %s", n.console)
		}
		return nil
	})
	// The published address stays: its users need one.
	if got := n.address(); got.Primary != addr("10.8.0.77") {
		t.Errorf("node address is %+v", got)
	}
}

// A server that answers only broadcasts, and sends 0.0.0.0 as its identifier.
func TestServerWithIdentifierZero(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.1.1/24")
	quickLeases(t)
	s := p.shortServer("far0", "0.0.0.0", "10.8.1.77", 6)
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	eventually.That(t, 30*time.Second, "the lease is extended twice", func() error {
		if got := s.extensions(); len(got) < 2 {
			return fmt.Errorf("extensions: %v", got)
		}
		return nil
	})
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.8.1.77/24")
}

// The address changes with a renewal: the old one is removed, the new one is published.
func TestChangedLease(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.2.1/24")
	quickLeases(t)
	s := p.shortServer("far0", "10.8.2.1", "10.8.2.77", 6)
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	s.set(func(s *shortServer) { s.give = net.IPv4(10, 8, 2, 99) })
	eventually.That(t, 30*time.Second, "the node has the new address", func() error {
		if got := n.address(); got.Primary != addr("10.8.2.99") {
			return fmt.Errorf("node address is %+v", got)
		}
		return nil
	})
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.8.2.99/24")
}

// A server refuses to extend a lease: the node stops using the address at once, and not when
// the lease ends. The request comes from the leased address, although the link has another one.
func TestRefusedLease(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.4.1/24")
	p.address("eth0", "10.8.4.9/24")
	s := p.shortServer("far0", "10.8.4.1", "10.8.4.77", 20)
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	s.set(func(s *shortServer) { s.nak, s.give = true, net.IPv4(10, 8, 4, 99) })
	eventually.That(t, 40*time.Second, "the lease is refused", func() error {
		if text := n.console.String(); !strings.Contains(text, "lost the DHCP lease of 10.8.4.77/24 on eth0: the server refused (NAK)") {
			return fmt.Errorf("console: %s", text)
		}
		return nil
	})
	becomes(t, "eth0", "10.8.4.9/24", "10.8.4.99/24")
	same(t, "requests", s.extensions(), "10.8.4.77:68 server=<nil>")
}

// RFC 2131 §3.7: a machine with a lease of an hour is connected to another network, whose server is dnsmasq: it has an
// address of that at once.
func TestLinkOnAnotherNetwork(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.5.1/24")
	s := p.shortServer("far0", "10.8.5.1", "10.8.5.77", 3600)
	n := startNode(t, config.Network{})
	n.up(10 * time.Second)
	s.stop()
	p.do(func() {
		l, err := netlink.LinkByName("far0")
		for _, step := range []func() error{
			func() error { return netlink.LinkSetDown(l) },
			func() error {
				return netlink.AddrReplace(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 8, 6, 1), Mask: net.CIDRMask(24, 32)}})
			},
			func() error {
				return netlink.AddrDel(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 8, 5, 1), Mask: net.CIDRMask(24, 32)}})
			},
			func() error { return netlink.LinkSetUp(l) },
		} {
			if err == nil {
				err = step()
			}
		}
		if err != nil {
			t.Fatalf("another network: %v", err)
		}
	})
	p.dnsmasq("--interface=far0", "--dhcp-range=10.8.6.50,10.8.6.60,1h")
	eventually.That(t, 90*time.Second, "the node has an address of the other network", func() error {
		if got := n.address(); !prefix("10.8.6.0/24").Contains(got.Primary) {
			return fmt.Errorf("node address is %+v; console: %s", got, n.console)
		}
		return nil
	})
	if got := addresses(t, "eth0"); len(got) != 1 {
		t.Errorf("addresses of eth0: %q", got)
	}
}

// Without a DHCP answer: one clear line on the console, and the node gets up as
// soon as a server answers.
func TestNoDHCPAnswerThenOne(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.8.3.1/24")
	s := p.shortServer("far0", "10.8.3.1", "10.8.3.77", 60)
	s.set(func(s *shortServer) { s.mute = true })
	n := startNode(t, config.Network{})
	// The fourth try ends after 13.5 to 16.5 s of this machine's time.
	silence, began := regexp.MustCompile(`\[garboard\] networkd: no DHCP answer on eth0 for (\d+s);`), time.Now()
	eventually.That(t, 30*time.Second, "the console says that there is no answer", func() error {
		text := n.console.String()
		match := silence.FindStringSubmatch(text)
		if match == nil {
			return fmt.Errorf("console: %q", text)
		}
		lasted, err := time.ParseDuration(match[1])
		if lost := eventually.Lost(began, time.Now()); err != nil || lasted < 10*time.Second || lasted-lost >= 20*time.Second {
			t.Fatalf("it says so after %s, %s of them lost: %v", match[1], lost, err)
		}
		for _, part := range []string{"; asking again at least every 1m4s. ", "machine.network.interfaces"} {
			if !strings.Contains(text, part) {
				return fmt.Errorf("console: %q", text)
			}
		}
		return nil
	})
	if st, _ := n.graph.Status(ID); st.Up || st.Reason != DHCPUnanswered || !strings.Contains(st.Message, `Waiting for DHCP answer on "eth0"`) {
		t.Errorf("status is %+v", st)
	}
	s.set(func(s *shortServer) { s.mute = false })
	// The link goes down and up: the pause ends at once.
	p.do(func() {
		l, err := netlink.LinkByName("far0")
		if err == nil {
			err = netlink.LinkSetDown(l)
		}
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			t.Errorf("flap: %v", err)
		}
	})
	n.up(5 * time.Second)
	if got := strings.Count(n.console.String(), "no DHCP answer"); got != 1 {
		t.Errorf("the console heard %d times of it:\n%s", got, n.console)
	}
}

// Two cards by DHCP: both default routes are there, the first card's has priority,
// and the node's address is the first card's, whichever server answered first.
func TestTwoDHCPLinks(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.9.0.1/24")
	p.wire("eth1", "far1", "10.9.1.1/24")
	p.dnsmasq("--interface=far0", "--interface=far1", "--dhcp-range=10.9.0.50,10.9.0.60,2m", "--dhcp-range=10.9.1.50,10.9.1.60,2m")
	n := startNode(t, config.Network{})
	n.up(15 * time.Second)
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.9.0.1 metric 1024")
	same(t, "routes of eth1", routes(t, "eth1"), "0.0.0.0/0 via 10.9.1.1 metric 1025")
	if got := n.address(); !prefix("10.9.0.0/24").Contains(got.Primary) || len(got.All) != 2 {
		t.Errorf("node address is %+v", got)
	}
}

// The node keeps the address of earlier boots as long as it has it.
func TestNodeAddressIsPinned(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.10.0.1/24")
	dir := t.TempDir()
	two := config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.10.0.2/24")}, {Name: "eth0", CIDR: prefix("10.10.0.3/24")},
	}}
	first := startNodeIn(t, dir, config.Network{Interfaces: two.Interfaces[1:]})
	first.up(5 * time.Second)
	first.stop()
	if data, err := os.ReadFile(first.pin); err != nil || string(data) != "10.10.0.3\n" {
		t.Fatalf("pinned %q, %v", data, err)
	}
	second := startNodeIn(t, dir, two)
	second.up(5 * time.Second)
	if got := second.address(); got.Primary != addr("10.10.0.3") || !strings.Contains(got.Why, "chosen earlier") {
		t.Errorf("node address is %+v", got)
	}
	// The node has lost it: another one is chosen, with a line on the console.
	second.configure(config.Network{Interfaces: two.Interfaces[:1]})
	eventually.That(t, 5*time.Second, "the node has another address", func() error {
		if got := second.address(); got.Primary != addr("10.10.0.2") {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.10.0.2/24")
}

// A changed configuration is applied while running.
func TestLiveChange(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.11.0.1/24")
	entry := config.Interface{Name: "eth0", CIDR: prefix("10.11.0.2/24"), Routes: []config.Route{
		{Network: prefix("0.0.0.0/0"), Gateway: addr("10.11.0.1")},
		{Network: prefix("172.21.0.0/16"), Gateway: addr("10.11.0.1")},
	}}
	n := startNode(t, config.Network{Hostname: "one", Interfaces: []config.Interface{entry}})
	n.up(5 * time.Second)

	entry.CIDR, entry.Routes, entry.MTU = prefix("10.11.0.7/24"), entry.Routes[:1], 1300
	n.configure(config.Network{Hostname: "two", Nameservers: []netip.Addr{addr("192.0.2.53")}, Interfaces: []config.Interface{entry}})
	eventually.That(t, 5*time.Second, "the change is applied", func() error {
		if got := n.address(); got.Primary != addr("10.11.0.7") {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	same(t, "addresses of eth0", addresses(t, "eth0"), "10.11.0.7/24")
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.11.0.1 metric 1024")
	n.names("two", "10.11.0.7 two\n", "nameserver 192.0.2.53\n")

	entry = config.Interface{Name: "eth0", Ignore: true}
	n.configure(config.Network{Hostname: "two", Interfaces: []config.Interface{entry}})
	eventually.That(t, 5*time.Second, "nothing of ours is on the link", func() error {
		if a, r := addresses(t, "eth0"), routes(t, "eth0"); len(a)+len(r) > 0 {
			return fmt.Errorf("%v, %v", a, r)
		}
		return nil
	})
}

// A link that is added later, and one that is removed and added again.
func TestLinkComesAndGoes(t *testing.T) {
	p := newPeer(t)
	p.wire("eth1", "far1", "10.12.9.1/24")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.12.0.2/24"), Routes: []config.Route{
		{Network: prefix("0.0.0.0/0"), Gateway: addr("10.99.0.1")}, // not on the link's own network
	}}, static("eth1", "10.12.9.2/24", 0)}})
	eventually.That(t, 5*time.Second, "networkd waits for the link by name", func() error {
		if s, _ := n.graph.Status(ID); s.Reason != LinkMissing || s.Message != `Waiting for interface "eth0" to appear` {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	// What it has meanwhile is known: a control plane is reached by that.
	eventually.That(t, 5*time.Second, "the addresses so far are published", func() error {
		if o, err := Statuses.Get(n.store, ID); err != nil || !slices.Contains(o.Spec.Addresses, prefix("10.12.9.2/24")) {
			return fmt.Errorf("%v (%v)", o.Spec.Addresses, err)
		}
		return nil
	})
	p.wire("eth0", "far0", "10.12.0.1/24")
	n.up(5 * time.Second)
	same(t, "routes of eth0", routes(t, "eth0"), "0.0.0.0/0 via 10.99.0.1 metric 1024")

	l, err := netlink.LinkByName("eth0")
	if err == nil {
		err = netlink.LinkDel(l)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.wire("eth0", "far0", "10.12.0.1/24")
	eventually.That(t, 5*time.Second, "the new link has the address", func() error {
		if got := addresses(t, "eth0"); len(got) != 1 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	// Down and up again: the kernel has dropped the routes.
	l, _ = netlink.LinkByName("eth0")
	if err := netlink.LinkSetDown(l); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 5*time.Second, "the link is up with its route", func() error {
		if got := routes(t, "eth0"); len(got) != 1 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

//go:build kernel

package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/neighbor"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
)

// lookOften makes the node look for other owners of its addresses each second.
func lookOften(t *testing.T) {
	t.Helper()
	before, defend := lookEvery, defendEvery
	lookEvery, defendEvery = time.Second, time.Second
	t.Cleanup(func() { lookEvery, defendEvery = before, defend })
}

// mac is that of a link of the peer.
func (p *peer) mac(link string) (mac string) {
	p.t.Helper()
	p.do(func() {
		l, err := netlink.LinkByName(link)
		if err != nil {
			p.t.Error(err)
			return
		}
		mac = l.Attrs().HardwareAddr.String()
	})
	return mac
}

// hasConflict waits until an address of a link has this conflict; "" for none.
func (n *node) hasConflict(link, cidr, mac string) {
	n.t.Helper()
	want := ""
	if mac != "" {
		want = "another host of the network has this address: MAC " + mac
	}
	eventually.That(n.t, 10*time.Second, cidr+" has the problem "+want, func() error {
		o, err := OnLinks.Get(n.store, link+"-"+cidr)
		if err == nil && o.Spec.Problem != want {
			err = fmt.Errorf("its problem is %q", o.Spec.Problem)
		}
		s, none := Statuses.Get(n.store, ID) // written after that
		told := none == nil && slices.Contains(s.Spec.Problems, fmt.Sprintf("address %s of %s: %s", cidr, link, want))
		if err == nil && told != (mac != "") {
			err = fmt.Errorf("problems of the status are %q", s.Spec.Problems)
		}
		return errors.Join(err, none)
	})
}

// Another host has one of two static addresses: it has a problem, and the other one is the node's. When that host goes,
// the problem goes, and the node announces the address. A host that comes later is a problem, but it can't make the
// node give its address up.
func TestAnotherHostHasAStaticAddress(t *testing.T) {
	p := newPeer(t)
	lookOften(t)
	p.wire("eth0", "far0", "10.61.0.1/24")
	p.do(func() { p.address("far0", "10.61.0.2/24") })
	n := startNode(t, config.Network{Hostname: "box", Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.61.0.2/24")}, {Name: "eth0", CIDR: prefix("10.61.0.3/24")}}})
	n.up(5 * time.Second)
	n.hasConflict("eth0", "10.61.0.2/24", p.mac("far0"))
	n.hasConflict("eth0", "10.61.0.3/24", "")
	n.isKnownBy("10.61.0.3")
	becomes(t, "eth0", "10.61.0.3/24")

	heard := p.listen("far0", addr("10.61.0.2"))
	p.do(func() { ip(t, "address", "del", "10.61.0.2/24", "dev", "far0") })
	n.hasConflict("eth0", "10.61.0.2/24", "")
	heardOf(t, heard, neighbor.Announcement)
	becomes(t, "eth0", "10.61.0.3/24", "10.61.0.2/24")
	n.isKnownBy("10.61.0.3") // an address that was chosen stays

	p.do(func() { p.address("far0", "10.61.0.3/24") })
	n.hasConflict("eth0", "10.61.0.3/24", p.mac("far0"))
	n.isKnownBy("10.61.0.3")
}

func (n *node) isKnownBy(primary string) {
	n.t.Helper()
	eventually.That(n.t, 5*time.Second, "the node's address is "+primary, func() error {
		if got := n.address(); got.Primary != addr(primary) {
			return fmt.Errorf("its address is %+v", got)
		}
		return nil
	})
}

// listen receives what hosts say about an address on the peer's link, until the test ends.
func (p *peer) listen(link string, a netip.Addr) <-chan neighbor.Observation {
	p.t.Helper()
	heard := make(chan neighbor.Observation, 256)
	p.do(func() {
		l, err := netlink.LinkByName(link)
		if err != nil {
			p.t.Error(err)
			return
		}
		w, err := neighbor.Open(l, a, nil, func(o neighbor.Observed) { heard <- o.What })
		if err != nil {
			p.t.Error(err)
			return
		}
		p.t.Cleanup(func() { w.Close() })
	})
	return heard
}

func heardOf(t *testing.T, all <-chan neighbor.Observation, want neighbor.Observation) (before int) {
	t.Helper()
	late := time.After(10 * time.Second)
	for ; ; before++ {
		select {
		case got := <-all:
			if got == want {
				return before
			}
		case <-late:
			t.Fatalf("nothing like %d was heard, but %d others", want, before)
		}
	}
}

// An address that nobody else has: no problem, three probes and an announcement of it; nothing about the shared
// address. A second card on the same network, which answers for the first one's address, is the node itself.
func TestNobodyElseHasTheAddress(t *testing.T) {
	p := newPeer(t)
	p.cable("eth0", "far0")
	p.cable("eth1", "far1")
	p.do(func() {
		ip(t, "link", "add", "br0", "type", "bridge")
		for _, l := range []string{"far0", "far1"} {
			ip(t, "link", "set", l, "master", "br0", "up")
		}
		ip(t, "link", "set", "br0", "up")
		p.address("br0", "10.62.0.1/24")
	})
	heard, shared := p.listen("br0", addr("10.62.0.2")), p.listen("br0", addr("10.62.0.254"))
	l, err := netlink.LinkByName("eth0")
	if err == nil {
		err = netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(prefix("10.62.0.254/32"))})
	}
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.62.0.2/24"), VIP: &config.VIP{IP: addr("10.62.0.254")}}, {Name: "eth1", CIDR: prefix("10.62.0.3/24")}}})
	n.up(5 * time.Second)
	heardOf(t, heard, neighbor.Probe)
	heardOf(t, heard, neighbor.Announcement)
	n.hasConflict("eth0", "10.62.0.2/24", "")
	n.hasConflict("eth1", "10.62.0.3/24", "")
	n.isKnownBy("10.62.0.2")
	for len(shared) > 0 {
		if got := <-shared; got == neighbor.Probe || got == neighbor.Announcement {
			t.Errorf("the node says %d about the shared address", got)
		}
	}
	if text := n.console.String(); strings.Contains(text, "another host") {
		t.Errorf("console: %s", text)
	}
}

// Another host has the address that the server grants: the client declines it, and after a pause the server (a real
// one, which notes that) grants another.
func TestAnotherHostHasALeasedAddress(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.63.0.1/24")
	// The address is on a link that isn't the server's, so that the server doesn't know of it.
	p.do(func() {
		ip(t, "link", "add", "other0", "type", "dummy")
		ip(t, "link", "set", "other0", "up")
		p.address("other0", "10.63.0.50/32")
	})
	p.dnsmasq("--interface=far0", "--dhcp-range=10.63.0.50,10.63.0.59,2m")
	dir := t.TempDir()
	if err := keep(filepath.Join(dir, "node-address"), "10.63.0.50"); err != nil { // the client asks for it
		t.Fatal(err)
	}
	n := startNodeIn(t, dir, config.Network{})
	eventually.That(t, 10*time.Second, "the problem names the other host", func() error {
		s, err := Statuses.Get(n.store, ID)
		want := "DHCP lease of 10.63.0.50/24 on eth0 was declined: another host of the network has this address: MAC " + p.mac("far0")
		if err == nil && !slices.Contains(s.Spec.Problems, want) {
			err = fmt.Errorf("problems are %q", s.Spec.Problems)
		}
		return err
	})
	becomes(t, "eth0")
	n.up(4 * declinePause)
	var got NodeAddress
	eventually.That(t, 4*declinePause, "the node has another address", func() error {
		got = n.address()
		if there, err := addressesOf("eth0"); err != nil || len(there) != 1 || there[0] != got.All[0].String() || got.Primary == addr("10.63.0.50") {
			return fmt.Errorf("it has %q (%v) and is %+v", there, err, got)
		}
		return nil
	})
	n.hasConflict("eth0", got.All[0].String(), "")
}

// A server that insists on the address is asked at most each declinePause, and hears a DHCPDECLINE with the address
// each time.
func TestAServerThatInsists(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.64.0.1/24")
	p.do(func() { p.address("far0", "10.64.0.77/24") })
	s := p.shortServer("far0", "10.64.0.1", "10.64.0.77", 3600)
	startNode(t, config.Network{})
	eventually.That(t, 40*time.Second, "it is declined twice", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.declined) < 2 {
			return fmt.Errorf("declined: %v", s.declined)
		}
		return nil
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if gap := s.declined[1].at.Sub(s.declined[0].at); gap < declinePause {
		t.Errorf("the client asked again after %s", gap)
	}
	for _, d := range s.declined {
		if d.what != "10.64.0.77 of 10.64.0.1" {
			t.Errorf("declined %q", d.what)
		}
	}
}

// decline is a DHCPDECLINE that a server has heard.
type decline struct {
	at   time.Time
	what string
}

func (s *shortServer) noteDecline(m *dhcpv4.DHCPv4) {
	s.declined = append(s.declined, decline{time.Now(), fmt.Sprintf("%s of %s", m.RequestedIPAddress(), m.ServerIdentifier())})
}

// The kernel's neighbours of a managed link are published, and no more than are useful: a host that pretends to be
// thousands can't fill the store.
func TestNeighbors(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.65.0.1/16")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.65.0.2/16")}}})
	n.up(5 * time.Second)
	ip(t, "neighbour", "replace", "10.65.0.1", "lladdr", p.mac("far0"), "nud", "reachable", "dev", "eth0")
	ip(t, "neighbour", "replace", "10.65.0.9", "nud", "failed", "dev", "eth0")
	shown := func(want ...Neighbor) error {
		for _, w := range want {
			o, err := Neighbors.Get(n.store, w.Link+"-"+w.Address.String())
			if err != nil || o.Spec != w {
				return fmt.Errorf("it is %+v (%v), want %+v", o.Spec, err, w)
			}
		}
		return nil
	}
	eventually.That(t, 3*observeEvery, "both are shown", func() error {
		return shown(Neighbor{"eth0", addr("10.65.0.1"), p.mac("far0"), "reachable"}, Neighbor{"eth0", addr("10.65.0.9"), "", "failed"})
	})
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for i := range maxNeighbors + 50 {
		err := netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IPv4(10, 65, byte(1+i/256), byte(i%256)), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 2},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	eventually.That(t, 3*observeEvery, "the table is bounded", func() error {
		if got := len(Neighbors.List(n.store)); got != maxNeighbors {
			return fmt.Errorf("%d are shown", got)
		}
		return nil
	})
}

// A host that says all the time that it has the node's address makes the node neither give the address up, also when
// networkd starts again, nor say as often that it has it.
func TestTheNodeDefendsItsAddress(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.66.0.1/24")
	heard := p.listen("far0", addr("10.66.0.2"))
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.66.0.2/24")}}})
	n.up(5 * time.Second)
	heardOf(t, heard, neighbor.Announcement)
	began, ended, done := time.Now(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		p.do(func() { claim(t, "far0", addr("10.66.0.2"), ended) })
	}()
	t.Cleanup(func() { <-done })
	t.Cleanup(sync.OnceFunc(func() { close(ended) }))
	n.hasConflict("eth0", "10.66.0.2/24", p.mac("far0"))
	if err := n.graph.Restart(t.Context(), ID); err != nil {
		t.Fatal(err)
	}
	n.up(5 * time.Second)
	heardOf(t, heard, neighbor.Announcement)
	n.hasConflict("eth0", "10.66.0.2/24", p.mac("far0"))
	n.isKnownBy("10.66.0.2")
	becomes(t, "eth0", "10.66.0.2/24")
	said := 0
	for len(heard) > 0 {
		if <-heard == neighbor.Announcement {
			said++
		}
	}
	// Two frames for each time; each run says it once at first.
	if most := 2 * (2 + int(time.Since(began)/defendEvery)); said > most {
		t.Errorf("the node has said %d times that it has the address, want %d at most", said, most)
	}
}

// claim says that the link has the address, again and again.
func claim(t *testing.T, link string, a netip.Addr, ended <-chan struct{}) {
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Error(err)
		return
	}
	w, err := neighbor.Open(l, a, nil, func(neighbor.Observed) {})
	if err != nil {
		t.Error(err)
		return
	}
	defer w.Close()
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		select {
		case <-ended:
			tick.Stop()
			return
		case <-tick.C:
			if err := w.Send(neighbor.Announcements(w.MAC, a)...); err != nil {
				t.Error(err)
				return
			}
		}
	}
}

// Name servers that a router changes all the time are taken over, but not each one.
func TestARouterThatChangesAllTheTime(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.68.0.1/24")
	n := newNode(t, t.TempDir())
	var looks atomic.Int64
	n.change = func(o *Options) {
		o.read = func() (actual, error) {
			looks.Add(1)
			return readKernel()
		}
	}
	n.configure(config.Network{Interfaces: []config.Interface{{Name: "eth0", CIDR: prefix("10.68.0.2/24")}}})
	n.run(func(netlink.Link) bool { return false })
	n.up(5 * time.Second)
	var router *ndp.Conn
	eventually.That(t, 10*time.Second, "the router has an address", func() (err error) {
		p.do(func() {
			var far *net.Interface
			if far, err = net.InterfaceByName("far0"); err == nil {
				router, _, err = ndp.Listen(far, ndp.LinkLocal)
			}
		})
		return err
	})
	defer router.Close()
	before, began, calm := looks.Load(), time.Now(), 0
	last := began
	for tick, i := time.NewTicker(10*time.Millisecond), 1; time.Since(began) < 5*time.Second || i%2 == 1; i++ {
		server := &ndp.RecursiveDNSServer{Lifetime: time.Duration(i%2) * time.Hour, Servers: []netip.Addr{addr("fd68::1")}}
		if err := router.WriteTo(&ndp.RouterAdvertisement{Options: []ndp.Option{server}}, nil, netip.IPv6LinkLocalAllNodes()); err != nil {
			t.Fatal(err)
		}
		<-tick.C
		if time.Since(last) > retryEvery/2 { // this computer was busy, and the node may have had a calm tick
			calm++
		}
		last = time.Now()
	}
	most := int64((1+calm)*maxAtOnce) + 3*int64(1+time.Since(began)/time.Second)
	if got := looks.Load() - before; got < 2 || got > most {
		t.Errorf("networkd has looked %d times, want %d at most", got, most)
	}
	eventually.That(t, 5*time.Second, "the last change is taken over", func() error {
		if o, err := Resolvers.Get(n.store, ResolversID); err != nil || !slices.Equal(o.Spec, []netip.Addr{addr("fd68::1")}) {
			return fmt.Errorf("name servers are %v (%v)", o.Spec, err)
		}
		return nil
	})
}

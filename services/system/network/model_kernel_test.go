//go:build kernel

package network

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
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

// card is what the model knows of a card, its cable and its server.
type card struct {
	name, far, network     string // 10.100 for 10.100.0.0/24
	kind                   string // of its entry: ignore, static, other, dhcp, deaf (static, without advertisements)
	cable, leased, foreign bool
	server                 *shortServer
	answers                bool
	offer, given           string // the address that the server gives, and has given

	router       func()          // ends it; nil: there is none
	advertises   string          // the network of the router
	heard        map[string]bool // networks in which the card has made itself an address
	deaf, closed bool            // it takes no advertisements; nobody has set it up since it was down
}

func (c *card) static() string {
	if c.kind == "other" {
		return c.network + ".0.3/24"
	}
	return c.network + ".0.2/24"
}

// addresses that the card has.
func (c *card) addresses() (out []string) {
	if c.foreign {
		out = append(out, c.strange())
	}
	switch {
	case c.kind == "static" || c.kind == "other" || c.kind == "deaf":
		out = append(out, c.static())
	case c.kind == "dhcp" && c.leased:
		out = append(out, c.given+"/24")
	}
	return out
}

func (c *card) strange() string { return "192.0.2." + c.network[3:] + "/32" }

func (c *card) routes() []string {
	if c.kind == "static" || c.kind == "other" || c.kind == "deaf" {
		return []string{"172." + c.network[4:] + ".0.0/16 via " + c.network + ".0.1 metric 1024"}
	}
	return nil
}

func (c *card) entry() config.Interface {
	switch c.kind {
	case "ignore":
		return config.Interface{Name: c.name, Ignore: true}
	case "dhcp":
		return config.Interface{Name: c.name, DHCP: true}
	}
	in := config.Interface{Name: c.name, CIDR: prefix(c.static()), Routes: []config.Route{{Network: prefix("172." + c.network[4:] + ".0.0/16"), Gateway: addr(c.network + ".0.1")}}}
	if c.kind == "deaf" {
		in.AcceptRA = config.AdvertisementsOff
	}
	return in
}

// served notes that a card with a cable, a server and a client has a lease, and with a router an address in its
// network.
func (c *card) served() {
	if before := c.leased; c.kind != "dhcp" {
		c.leased = false
	} else if c.leased = before || c.cable && c.answers; c.leased && !before {
		c.given = c.offer
	}
	if c.router != nil && c.cable && !c.deaf && !c.closed {
		c.heard[c.advertises] = true
	}
}

// configured notes what a new kind, or a reboot, does to advertisements.
func (c *card) configured() {
	if c.kind != "ignore" {
		c.deaf, c.closed = c.kind == "deaf", false
	}
	if c.kind == "deaf" {
		clear(c.heard)
	}
}

// networks are those of router advertisements in which a link has addresses that it can use.
func networks(link string) (out []string, err error) {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return nil, err
	}
	all, err := netlink.AddrList(l, netlink.FAMILY_V6)
	for _, a := range all {
		if a.IP[0] == 0xfd && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			out = append(out, prefixOf(a.IPNet).Masked().String())
		}
	}
	return out, err
}

// modelEvents is for each run of the tests; NETWORK_EVENTS has another number, such as 2000.
const modelEvents = 150

// Random events (cables, servers and their offers, routers, configurations, changes by other programs, reboots) over
// four cards: after each, the kernel's state is what the model says. No goroutine is left.
func TestModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("NETWORK_SEED"), 10, 64); err == nil {
		seed = s
	}
	events := modelEvents
	if n, err := strconv.Atoi(os.Getenv("NETWORK_EVENTS")); err == nil {
		events = n
	}
	t.Logf("seed %d, %d events", seed, events)
	r := rand.New(rand.NewPCG(seed, 0))
	p, dir := newPeer(t), t.TempDir()
	var cards []*card
	for i := range 4 {
		c := &card{name: fmt.Sprintf("eth%d", i), far: fmt.Sprintf("far%d", i), network: fmt.Sprintf("10.1%d", 20+i), kind: "static", cable: true, answers: true, heard: map[string]bool{}}
		c.offer = c.network + ".0.77"
		p.wire(c.name, c.far, c.network+".0.1/24")
		c.server = p.shortServer(c.far, c.network+".0.1", c.offer, 3600)
		p.do(func() {
			// while its cable is out
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+c.far+"/keep_addr_on_down", []byte("1"), 0); err != nil {
				t.Error(err)
			}
			for _, n := range []string{"a", "b"} {
				p.address(c.far, fmt.Sprintf("fd%d:%s::1/64", 20+i, n))
			}
		})
		cards = append(cards, c)
	}
	network := func() (n config.Network) {
		n.Hostname = "model"
		for _, c := range cards {
			n.Interfaces = append(n.Interfaces, c.entry())
		}
		return n
	}
	eventually.That(t, time.Second, "its own goroutine runs", func() error { return nil })
	before := runtime.NumGoroutine()
	n := startNodeIn(t, dir, network())
	var history []string
	check := func() {
		t.Helper()
		for _, c := range cards {
			want := [][]string{c.addresses(), c.routes()}
			eventually.That(t, 10*time.Second, fmt.Sprintf("%s has %v after %v (seed %d)", c.name, want, history[max(0, len(history)-8):], seed), func() error {
				addrs, err := addressesOf(c.name)
				got := [][]string{addrs, routes(t, c.name)}
				for i := range got {
					slices.Sort(got[i])
					slices.Sort(want[i])
					if err == nil && !slices.Equal(got[i], want[i]) {
						err = fmt.Errorf("it has %v", got)
					}
				}
				return err
			})
			eventually.That(t, 30*time.Second, fmt.Sprintf("%s has addresses in %v after %v (seed %d)", c.name, c.heard, history[max(0, len(history)-8):], seed), func() error {
				got, err := networks(c.name)
				slices.Sort(got)
				if want := slices.Sorted(maps.Keys(c.heard)); err == nil && !slices.Equal(got, want) {
					err = fmt.Errorf("it has %v", got)
				}
				return err
			})
		}
	}
	plug := func(c *card, in bool) {
		if c.cable = in; in && c.leased && c.answers {
			c.given = c.offer // the client asks for it again
		}
		p.do(func() {
			l, err := netlink.LinkByName(c.far)
			if err == nil && in {
				err = netlink.LinkSetUp(l)
			} else if err == nil {
				err = netlink.LinkSetDown(l)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	run := func(args ...string) {
		if ip(t, args...); t.Failed() {
			t.Fatalf("after %v (seed %d)", history[max(0, len(history)-8):], seed)
		}
	}
	check()
	for i := range events {
		c := cards[r.IntN(len(cards))]
		event := []string{"cable", "server", "entry", "entry", "address", "route", "foreign", "reboot", "offer", "router"}[r.IntN(10)]
		if event == "reboot" && i%4 != 0 {
			event = "address"
		}
		history = append(history, event+" "+c.name)
		switch event {
		case "cable":
			plug(c, !c.cable)
		case "server":
			c.answers = !c.answers
			c.server.set(func(s *shortServer) { s.mute = !c.answers })
			if c.answers { // a client that has waited long asks again when its cable comes
				plug(c, false)
				plug(c, true)
			}
		case "entry":
			if kind := []string{"ignore", "static", "other", "dhcp", "deaf"}[r.IntN(5)]; kind != c.kind {
				c.kind, c.leased = kind, false
			}
			c.configured()
			n.configure(network())
		case "offer": // the server gives another address to who asks
			c.offer = c.network + map[bool]string{true: ".0.78", false: ".0.77"}[strings.HasSuffix(c.offer, "7")]
			c.server.set(func(s *shortServer) { s.give = net.ParseIP(c.offer) })
			if c.cable {
				plug(c, false)
				plug(c, true)
			}
		case "router":
			if c.router != nil {
				c.router()
				c.router = nil
				break
			}
			c.advertises = fmt.Sprintf("fd%s:%s::/64", c.network[4:], []string{"a", "b"}[r.IntN(2)])
			c.router = p.dnsmasq("--interface="+c.far, "--dhcp-range="+strings.TrimSuffix(c.advertises, "/64")+",ra-only,64,1h", "--enable-ra", "--ra-param="+c.far+",4,600")
		case "address":
			for _, a := range c.addresses() {
				if a != c.strange() {
					run("address", "del", a, "dev", c.name)
				}
			}
		case "route":
			for _, route := range c.routes() {
				to, _, _ := strings.Cut(route, " ")
				run("route", "del", to, "dev", c.name)
			}
		case "foreign":
			c.foreign = !c.foreign
			run("address", map[bool]string{true: "add", false: "del"}[c.foreign], c.strange(), "dev", c.name)
		case "reboot":
			n.stop()
			for _, c := range cards {
				c.leased, c.foreign, c.closed = false, false, true
				clear(c.heard)
				c.configured()
				run("address", "flush", "dev", c.name)
				run("link", "set", c.name, "down")
			}
			n = startNodeIn(t, dir, network())
		}
		for _, c := range cards {
			c.served()
		}
		check()
		if t.Failed() {
			return
		}
		if i%100 == 99 {
			t.Logf("%d events", i+1)
		}
	}
	n.stop()
	for _, c := range cards {
		if c.router != nil {
			c.router()
		}
	}
	eventually.That(t, 10*time.Second, "no goroutine is left", func() error {
		if now := runtime.NumGoroutine(); now > before {
			stacks := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines, %d before:\n%s", now, before, stacks[:runtime.Stack(stacks, true)])
		}
		return nil
	})
}

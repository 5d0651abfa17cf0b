//go:build kernel

package network

import (
	"fmt"
	"math/rand/v2"
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
)

// card is what the model knows of a card, its cable and its server.
type card struct {
	name, far, network     string // 10.100 for 10.100.0.0/24
	kind                   string // of its entry: ignore, static, other, dhcp
	cable, leased, foreign bool
	server                 *shortServer
	answers                bool
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
	case c.kind == "static" || c.kind == "other":
		out = append(out, c.static())
	case c.kind == "dhcp" && c.leased:
		out = append(out, c.network+".0.77/24")
	}
	return out
}

func (c *card) strange() string { return "192.0.2." + c.network[3:] + "/32" }

func (c *card) routes() []string {
	if c.kind == "static" || c.kind == "other" {
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
	return config.Interface{Name: c.name, CIDR: prefix(c.static()), Routes: []config.Route{{Network: prefix("172." + c.network[4:] + ".0.0/16"), Gateway: addr(c.network + ".0.1")}}}
}

// served notes that a card with a cable, a server and a client has a lease.
func (c *card) served() { c.leased = c.kind == "dhcp" && (c.leased || c.cable && c.answers) }

// modelEvents is for each run of the tests; NETWORK_EVENTS has another number, such as 2000.
const modelEvents = 150

// Random events (cables, servers, configurations, changes by other programs, reboots) over four cards: after each, the
// kernel's state is what the model says. No goroutine is left.
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
		c := &card{name: fmt.Sprintf("eth%d", i), far: fmt.Sprintf("far%d", i), network: fmt.Sprintf("10.1%d", 20+i), kind: "static", cable: true, answers: true}
		p.wire(c.name, c.far, c.network+".0.1/24")
		c.server = p.shortServer(c.far, c.network+".0.1", c.network+".0.77", 3600)
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
		}
	}
	plug := func(c *card, in bool) {
		c.cable = in
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
		event := []string{"cable", "server", "entry", "entry", "address", "route", "foreign", "reboot"}[r.IntN(8)]
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
			if kind := []string{"ignore", "static", "other", "dhcp"}[r.IntN(4)]; kind != c.kind {
				c.kind, c.leased = kind, false
			}
			n.configure(network())
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
				c.leased, c.foreign = false, false
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
	eventually.That(t, 10*time.Second, "no goroutine is left", func() error {
		if now := runtime.NumGoroutine(); now > before {
			stacks := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines, %d before:\n%s", now, before, stacks[:runtime.Stack(stacks, true)])
		}
		return nil
	})
}

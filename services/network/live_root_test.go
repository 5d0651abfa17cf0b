package network

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/machine"
	"github.com/garboard-os/garboard/services/resource"
	"github.com/vishvananda/netlink"
)

func cards(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, "eth") }

// becomes waits for the addresses of a link.
func becomes(t *testing.T, link string, want ...string) {
	t.Helper()
	eventually.That(t, 10*time.Second, fmt.Sprintf("%s has %v", link, want), func() error {
		if got := addresses(t, link); !slices.Equal(got, want) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}

// Before machined has looked for a configuration no link is touched; then,
// without one, every card asks for an address; and when a configuration comes it
// is taken over, and nothing that the cluster relies on is said before it holds.
func TestMaintenanceThenConfigured(t *testing.T) {
	needRoot(t)
	p := newPeer(t)
	p.wire("eth0", "far0", "10.15.0.1/24")
	p.wire("eth1", "far1", "10.15.1.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.15.0.50,10.15.0.60,2m", "--dhcp-option=option:dns-server,10.15.0.53")
	n := newNode(t, t.TempDir())
	n.run(cards)
	eventually.That(t, 5*time.Second, "networkd waits for machined", func() error {
		if s, _ := n.graph.Status(ID); !strings.Contains(s.Message, "the search for a configuration to end") {
			return fmt.Errorf("%s: %s", s.State, s.Message)
		}
		return nil
	})
	n.stage(machine.Maintenance)
	// eth1 has a carrier and no server: one address is enough after a moment.
	n.up(linkGrace + 10*time.Second)
	if got := n.address(); !prefix("10.15.0.0/24").Contains(got.Primary) {
		t.Fatalf("node address is %+v", got)
	}
	if _, err := os.Stat(n.pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an address of maintenance mode was kept for later boots (%v)", err)
	}

	n.configure(config.Network{Hostname: "node-1", Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.15.0.2/24")},
		{Name: "eth2", CIDR: prefix("10.15.2.2/24")}, // comes later
		{Name: "eth1", Ignore: true},
	}})
	becomes(t, "eth0", "10.15.0.2/24")
	eventually.That(t, 5*time.Second, "the old address is withdrawn", func() error {
		if o, err := Addresses.Get(n.store, AddressID); !errors.Is(err, resource.ErrNotFound) {
			return fmt.Errorf("it is %v (%v)", o.Spec, err)
		}
		return nil
	})
	p.wire("eth2", "far2", "10.15.2.1/24")
	eventually.That(t, 5*time.Second, "the new address is published", func() error {
		_, err := Addresses.Get(n.store, AddressID)
		return err
	})
	if got := n.address(); got.Primary != addr("10.15.0.2") {
		t.Errorf("node address is %+v", got)
	}
	if o, err := Hostnames.Get(n.store, HostnameID); err != nil || o.Spec != "node-1" {
		t.Errorf("host name is %q (%v)", o.Spec, err)
	}
	if kept, err := os.ReadFile(n.pin); err != nil || string(kept) != "10.15.0.2\n" {
		t.Errorf("kept address is %q (%v)", kept, err)
	}
}

//go:build kernel

package network

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

func (n *node) hasProblem(what string) {
	n.t.Helper()
	eventually.That(n.t, 20*time.Second, "a problem is "+what, func() error {
		s, err := Statuses.Get(n.store, ID)
		if err == nil && !slices.ContainsFunc(s.Spec.Problems, func(p string) bool { return strings.Contains(p, what) }) {
			err = fmt.Errorf("%q", s.Spec.Problems)
		}
		return err
	})
}

// A card that an entry names and another one selects by its address has the first one's settings, and the node says so.
func TestTwoEntriesForOneCard(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.92.0.1/24")
	card, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{
		{Name: "eth0", CIDR: prefix("10.92.0.2/24")}, {HardwareAddr: card.Attrs().HardwareAddr.String(), CIDR: prefix("10.92.1.2/24")},
	}})
	n.up(30 * time.Second)
	n.hasProblem("two entries are for eth0")
	becomes(t, "eth0", "10.92.0.2/24")
}

// A second name of a card that another program removes comes back at once.
func TestSecondNameComesBack(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.92.2.1/24")
	card, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	n := startNode(t, config.Network{Interfaces: []config.Interface{{Name: "uplink", HardwareAddr: card.Attrs().HardwareAddr.String(), CIDR: prefix("10.92.2.2/24")}}})
	n.up(30 * time.Second)
	shows(t, "altname uplink", "link", "show", "eth0")
	if err := netlink.LinkDelAltName(card, "uplink"); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 10*time.Second, "it is there again", func() error { _, err := netlink.LinkByName("uplink"); return err })
}

// The node doesn't wait for a member of a bond that isn't there, and says that it is missing.
func TestMissingMember(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.92.3.1/24")
	n := startNode(t, config.Network{Interfaces: []config.Interface{{
		Name: "bond0", CIDR: prefix("10.92.3.2/24"), Bond: &config.Bond{Mode: "active-backup", MIIMon: new(100), Interfaces: []string{"eth0", "eth7"}},
	}}})
	n.up(10 * time.Second)
	n.hasProblem(`interface "eth7" to appear`)
}

//go:build kernel

package network

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// bridges replace WireGuard links, which User Mode Linux doesn't have: they are
// made and removed in the same way. Bonds and VLANs are real.
func bridges(v virtual, parent int) netlink.Link {
	if v.entry.WireGuard == nil {
		return v.link(parent)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = v.name
	return &netlink.Bridge{LinkAttrs: attrs}
}

// memberOf waits until a link is in another, or in none.
func memberOf(t *testing.T, link, master string) {
	t.Helper()
	eventually.That(t, 5*time.Second, fmt.Sprintf("%s is in %q", link, master), func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		want := 0
		if master != "" {
			m, err := netlink.LinkByName(master)
			if err != nil {
				return err
			}
			want = m.Attrs().Index
		}
		if got := l.Attrs().MasterIndex; got != want {
			return fmt.Errorf("its master is %d, not %d", got, want)
		}
		return nil
	})
}

func missingLink(t *testing.T, link string) {
	t.Helper()
	eventually.That(t, 5*time.Second, link+" is gone", func() error {
		_, err := netlink.LinkByName(link)
		var missing netlink.LinkNotFoundError
		if !errors.As(err, &missing) {
			return fmt.Errorf("it is there (%v)", err)
		}
		return nil
	})
}

// S-092, S-093, S-105: virtual links are made, changed and removed with the
// configuration; after that, the links below are ordinary links again.
func TestVirtualLinksFollow(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.18.0.1/24")
	p.wire("eth1", "far1", "10.18.1.1/24")
	p.dnsmasq("--interface=far0", "--dhcp-range=10.18.0.50,10.18.0.59,2m")
	var mu sync.Mutex
	var keys []string
	var device wgtypes.Device
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) {
		o.link = bridges
		o.wireguard = func(name string, c *wgtypes.Config) (*wgtypes.Device, error) {
			mu.Lock()
			defer mu.Unlock()
			if c != nil {
				keys, device = append(keys, fmt.Sprintf("%s port %d peers %d", name, *c.ListenPort, len(c.Peers))), wgtypes.Device{ListenPort: *c.ListenPort, PrivateKey: *c.PrivateKey}
			}
			return new(device), nil
		}
	}
	// Like the kernel's own bond0, which the module makes when the first bond is
	// requested.
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bond0"
	if err := netlink.LinkAdd(netlink.NewLinkBond(attrs)); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	found, err := netlink.LinkByName("bond0")
	if err != nil {
		t.Fatal(err)
	}
	bond := func(members ...string) config.Interface {
		return config.Interface{Name: "bond0", DHCP: true, Bond: &config.Bond{Mode: "802.3ad", MIIMon: new(100), Interfaces: members}}
	}
	wg := config.Interface{Name: "wg0", CIDR: prefix("10.1.0.2/24"), WireGuard: &config.WireGuard{
		PrivateKey: "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=", ListenPort: 51111,
	}}
	n.configure(config.Network{Interfaces: []config.Interface{bond("eth0"), wg,
		{Name: "eth1", VLANs: []config.VLAN{{ID: 7, CIDR: prefix("10.18.7.2/24")}}}}})
	n.run(cards)
	n.up(10 * time.Second)
	memberOf(t, "eth0", "bond0")
	if got := addresses(t, "bond0"); len(got) != 1 || !strings.HasPrefix(got[0], "10.18.0.5") {
		t.Errorf("the bond has %v", got)
	}
	same(t, "addresses of eth0", addresses(t, "eth0"))
	same(t, "addresses of eth1.7", addresses(t, "eth1.7"), "10.18.7.2/24")
	same(t, "addresses of wg0", addresses(t, "wg0"), "10.1.0.2/24")
	observed := func(want ...string) {
		t.Helper()
		eventually.That(t, 2*observeEvery, fmt.Sprintf("the status of WireGuard links %q", want), func() error {
			var got []string
			for _, s := range WireGuardStatuses.List(n.store) {
				got = append(got, fmt.Sprintf("%s port %d", s.ID, s.Spec.ListenPort))
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("it is %q", got)
			}
			return nil
		})
	}
	observed("wg0 port 51111")

	// Members are added and removed without a new bond.
	before, err := netlink.LinkByName("bond0")
	if err != nil || before.Attrs().Index == found.Attrs().Index {
		t.Fatalf("the bond is the one that was there (%v)", err)
	}
	n.configure(config.Network{Interfaces: []config.Interface{bond("eth0", "eth1"), wg}})
	memberOf(t, "eth1", "bond0")
	missingLink(t, "eth1.7")
	n.configure(config.Network{Interfaces: []config.Interface{bond("eth0"), wg}})
	memberOf(t, "eth1", "")
	if after, err := netlink.LinkByName("bond0"); err != nil || after.Attrs().Index != before.Attrs().Index {
		t.Errorf("the bond was made anew (%v)", err)
	}
	// With other options the bond is new.
	other := bond("eth0")
	other.Bond.MIIMon = new(50)
	wg.WireGuard = &config.WireGuard{PrivateKey: wg.WireGuard.PrivateKey, ListenPort: 51112}
	n.configure(config.Network{Interfaces: []config.Interface{other, wg}})
	eventually.That(t, 5*time.Second, "the bond is another one", func() error {
		after, err := netlink.LinkByName("bond0")
		if err == nil && after.Attrs().Index == before.Attrs().Index {
			err = errors.New("it is the old one")
		}
		return err
	})
	memberOf(t, "eth0", "bond0")

	n.configure(config.Network{Interfaces: []config.Interface{static("eth0", "10.18.0.2/24", 0)}})
	missingLink(t, "bond0")
	missingLink(t, "wg0")
	observed()
	becomes(t, "eth0", "10.18.0.2/24")
	n.follows()
	mu.Lock()
	defer mu.Unlock()
	same(t, "keys given", keys, "wg0 port 51111 peers 0", "wg0 port 51112 peers 0")
}

// A link that the kernel can't make is reported, and no longer once it isn't wanted.
func TestVirtualLinkThatCannotBe(t *testing.T) {
	p := newPeer(t)
	p.wire("eth0", "far0", "10.19.0.1/24")
	p.wire("wg0", "far1", "10.19.1.1/24")       // another program's
	ip(t, "link", "add", "d0", "type", "dummy") // also of the kind of ours
	t.Cleanup(func() { ip(t, "link", "del", "d0") })
	foreign, err := netlink.LinkByName("d0")
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t, t.TempDir())
	n.change = func(o *Options) { o.link = bridges }
	good := static("eth0", "10.19.0.2/24", 0)
	n.configure(config.Network{Interfaces: []config.Interface{good}})
	n.run(cards)
	n.up(5 * time.Second)
	n.configure(config.Network{Interfaces: []config.Interface{good, {Name: "wg0", WireGuard: &config.WireGuard{}}}})
	n.follows("wg0 is there already, as a veth of another program")
	n.configure(config.Network{Interfaces: []config.Interface{good, {Name: "d0", Dummy: true}}})
	n.follows("d0 is there already, as a dummy of another program")
	n.configure(config.Network{Interfaces: []config.Interface{good}})
	n.follows()
	if _, err := netlink.LinkByName("wg0"); err != nil {
		t.Error("another program's link was removed")
	}
	if l, err := netlink.LinkByName("d0"); err != nil || l.Attrs().Index != foreign.Attrs().Index {
		t.Errorf("another program's link was made anew: %v (%v)", l, err)
	}
}

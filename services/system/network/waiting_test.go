package network

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A node with two links by DHCP waits for the one that had its address before,
// whether that has no answer yet or no carrier. For other links it waits only
// linkGrace, and for none without an end.
func TestWaitsForTheAddressThatItHasHad(t *testing.T) {
	t.Parallel()
	const was, other = "10.0.0.9/24", "10.1.0.9/24"
	for name, test := range map[string]struct {
		pinned, first string // the address of an earlier boot, and that of the faster link
		carrier       bool   // of the slow one
		want          time.Duration
	}{
		"the first boot":                   {"", other, true, linkGrace},
		"the first boot, one unplugged":    {"", other, false, 0},
		"it is there already":              {was, was, true, linkGrace},
		"it may come with the other link":  {was, other, true, pinGrace},
		"or with one that has no link yet": {was, other, false, pinGrace},
		"or with an advertisement":         {"2001:db8::9/64", other, false, pinGrace},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				quick, slow := netlink.LinkAttrs{Name: "eth0", Index: 2, RawFlags: unix.IFF_LOWER_UP}, netlink.LinkAttrs{Name: "eth1", Index: 3}
				if test.carrier {
					slow.RawFlags = unix.IFF_LOWER_UP
				}
				o := &owner{
					cfg:   &config.Config{},
					links: map[string]netlink.Link{"eth0": &netlink.Device{LinkAttrs: quick}, "eth1": &netlink.Device{LinkAttrs: slow}},
					clients: map[leaseKey]*client{
						{"eth0", "DHCP"}: {lease: &lease{addresses: []leasedAddress{{Prefix: netip.MustParsePrefix(test.first)}}}},
						{"eth1", "DHCP"}: {},
					},
					Daemon: New(Options{physical: func(netlink.Link) bool { return true }}),
					wanted: []want{{address{2, netip.MustParsePrefix(test.first)}, ""}},
					state:  actual{objects: map[object]bool{address{2, netip.MustParsePrefix(test.first)}: true}},
				}
				if test.pinned != "" {
					o.pinned = netip.MustParsePrefix(test.pinned).Addr()
				}
				began, reported := time.Now(), ""
				for lacking := o.lacking(o.candidates()); len(lacking) > 0; lacking = o.lacking(o.candidates()) {
					reported = errors.Join(lacking...).Error()
					time.Sleep(time.Second)
				}
				if took := time.Since(began); took != test.want {
					t.Errorf("it waits %s, not %s, for %s", took, test.want, reported)
				}
				if named := strings.Contains(reported, "the address that the node has had"); named != (test.want == pinGrace) {
					t.Errorf("it says that it waits for %s", reported)
				}
			})
		})
	}
}

// An entry that leaves the addresses to router advertisements waits for one, and says so.
func TestWaitsForAdvertisements(t *testing.T) {
	t.Parallel()
	for want, entry := range map[string]config.Link{
		`router advertisement on "eth0"`:   {Name: "eth0", AcceptRA: config.AdvertisementsOn},
		"a router advertisement on eth0":   {Name: "eth0", MTU: 1400},
		"a network card to appear":         {Name: "eth0", AcceptRA: config.AdvertisementsOff},
		`address 2001:db8::9/64 on "eth0"`: {Name: "eth0", AcceptRA: config.AdvertisementsOn, Addresses: []netip.Prefix{prefix("2001:db8::9/64")}},
	} {
		o := &owner{
			cfg: &config.Config{}, plans: []config.Link{entry}, Daemon: New(Options{physical: func(netlink.Link) bool { return true }}),
			links: map[string]netlink.Link{"eth0": &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 2}}},
		}
		if got := errors.Join(o.lacking(nil)...).Error(); got != want {
			t.Errorf("%+v: it waits for %s, want %s", entry, got, want)
		}
	}
}
